"""`tokendrop prepare`: token shards of a job's corpus."""

import argparse

from tokendrop.cli.arguments import add_job
from tokendrop.cli.command import Command, Outcome, fail
from tokendrop.config.files import shown
from tokendrop.config.load import load_job
from tokendrop.errors import UserError, cause_of
from tokendrop.output import log


def run(options: argparse.Namespace) -> Outcome:
    """Prepare all token shards; exit code 1 where storage or Ray fails.

    Raises:
        UserError: something is wrong with the job, its corpus or its tokenizer.
    """
    from ray.exceptions import RayError

    from tokendrop.data.prepare.cut_examples import note_of_cut
    from tokendrop.data.prepare.pipeline import prepare
    from tokendrop.data.shards.format import SPLITS
    from tokendrop.data.shards.manifest import read_header
    from tokendrop.launch.cluster import connect
    from tokendrop.launch.head_watch import HeadWatch
    from tokendrop.launch.initial import with_initial
    from tokendrop.launch.results import with_absolute_paths
    from tokendrop.launch.stopping import stopping_in_time
    from tokendrop.launch.watch import prepare_line

    config = with_initial(with_absolute_paths(load_job(options.job, options.overrides)))
    if config.data.is_stored:
        raise UserError(
            f"data.folder: {shown(config.data.folder)} is only read; want a folder here, and then to copy the one that"
            " this command prints, e.g. by aws s3 cp --recursive"
        )
    with stopping_in_time():
        connect(name=config.name)
        try:
            with HeadWatch(), prepare_line(config) as progress:
                folder = prepare(config, progress=progress)
        except (RayError, OSError) as error:
            fail(f"the preparation failed ({cause_of(error)}); what is committed stays for the next attempt")
    if note := note_of_cut(folder):
        log(f"note     {note}")
    header = read_header(folder)
    rows = dict(zip(SPLITS, header.rows, strict=True))
    counts = {"documents": header.documents, "rejected": header.rejected, "tokens": header.tokens}
    parts = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    text = f"{folder}: {parts}; rows: " + ", ".join(f"{count:,} {split}" for split, count in rows.items())
    return Outcome({"folder": str(folder), **counts, "rows": rows}, text)


COMMAND = Command(
    "prepare",
    run,
    add_job,
    about="Turn a job's corpus into packed token shards, streamed by Ray Data.",
    example="tokendrop prepare jobs/pretrain/quickstart.yaml",
)
