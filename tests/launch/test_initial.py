"""What a run that goes on keeps of what it found when it began, and what its job may still say."""

from pathlib import Path

import pytest

from corpora import byte_tokenizer
from images import MODEL, TASK
from runs import begin
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.launch.initial import as_begun, with_initial
from tokendrop.track.run_folder import TOKENIZER
from tokendrop.train.checkpoint_index import latest_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained(folder: Path, name: str, **changes: object) -> Path:
    """A run with a checkpoint and a tokenizer."""
    (folder / name).mkdir()
    run = begin(folder / name, experiment(**changes))
    byte_tokenizer(run / TOKENIZER)
    return run


def job(init_from: Path | None, **changes: object) -> ExperimentConfig:
    return experiment(model__init_from=init_from and str(init_from), **changes)


def test_before_its_first_checkpoint_a_run_begins_with_what_its_job_says_now(tmp_path: Path) -> None:
    first, second = (trained(tmp_path, name) for name in ("first", "second"))
    for before in (None, first):
        folder = tmp_path / f"begun with {before and before.parent.name}"
        folder.mkdir()
        run = begin(folder, job(before, data__epoch_samples=5), step=0)
        config = as_begun(job(second, data__epoch_samples=7), run)
        assert config.model.init_from == str(latest_checkpoint(second))
        assert config.data.tokenizer == str(second / TOKENIZER)
        assert config.data.epoch_samples == 7
        assert as_begun(job(None), run).data.tokenizer is None
    with pytest.raises(UserError, match=r"model\.heads: .* has 2, this job 4; want 2"):
        as_begun(job(second, model__heads=4), run)


def test_a_vit_begins_with_one_of_ours(tmp_path: Path) -> None:
    """Whose run has a vocabulary of labels, which is no tokenizer."""
    images: dict[str, object] = {"task": TASK, "model": MODEL, "drop": {"method": "none"}}
    run = trained(tmp_path, "vit", **images)
    found = with_initial(experiment(**images | {"model": MODEL | {"init_from": str(run)}}))
    assert (found.model.init_from, found.data.tokenizer) == (str(latest_checkpoint(run)), None)


def test_from_its_first_checkpoint_on_a_run_keeps_what_it_found(tmp_path: Path) -> None:
    found = {"data__tokenizer": "/found/tokenizer.json", "data__epoch_samples": 5}
    run = begin(tmp_path, job(Path("/found/run"), **found))
    config = as_begun(job(Path("gone")), run)
    assert (config.model.init_from, config.data.tokenizer) == ("/found/run", "/found/tokenizer.json")
    assert config.data.epoch_samples == 5
    own = as_begun(job(Path("gone"), data__tokenizer="/own/vocab.txt", data__epoch_samples=7), run)
    assert (own.data.tokenizer, own.data.epoch_samples) == ("/own/vocab.txt", 7)
