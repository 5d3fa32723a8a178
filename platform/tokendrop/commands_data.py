"""What the commands `tokendrop data ...` do; heavy libraries are imported where they are used."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from tokendrop.errors import UserError
from tokendrop.render import print_json, print_text, progress_line
from tokendrop.render_data import audit_text, sample_text, stats_text, verify_text


def audit(options: argparse.Namespace) -> None:
    from tokendrop.track.audit import audit

    with progress_line("audit", "steps") as progress:
        found = audit(options.run_folder, progress=progress)
    result = asdict(found)
    if options.json:
        print_json(result)
    else:
        print_text(audit_text(result))
    if not found.is_clean:
        sys.exit(1)


def show(options: argparse.Namespace) -> None:
    from tokendrop.data.inspection import find_sample

    result = asdict(find_sample(shards_folder(options.path), options.sample, options.split))
    if options.json:
        print_json(result, is_corpus=True)
    else:
        print_text(sample_text(result), is_corpus=True)


def stats(options: argparse.Namespace) -> None:
    from tokendrop.data.inspection import count_tokens

    result = asdict(count_tokens(shards_folder(options.path)))
    if options.json:
        print_json(result)
    else:
        print_text(stats_text(result))


def verify(options: argparse.Namespace) -> None:
    from tokendrop.data.verify import verify

    folder = shards_folder(options.path)
    with progress_line("verify", "bytes") as progress:
        found = verify(folder, progress=progress)
    result = asdict(found)
    if options.json:
        print_json(result)
    else:
        print_text(verify_text(result))
    if found.damaged:
        sys.exit(1)


def shards_folder(path: Path) -> Path:
    """The folder of token shards that a path names: itself, that of a manifest, or that of a run."""
    from tokendrop.data.shards import MANIFEST

    folder = path.parent if path.name == MANIFEST else path
    if (folder / MANIFEST).is_file():
        return folder
    from tokendrop.track.run_folder import JOB, shards_of  # which import torch

    if not (path / JOB).is_file():
        raise UserError(f"{path}: want a folder of token shards, its {MANIFEST}, or a run folder")
    return shards_of(path)
