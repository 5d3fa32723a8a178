"""Studies of the paper, trained for real, a few steps each."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from corpora import documents, write_corpus
from tokendrop.cli.main import main

pytestmark = pytest.mark.ray
STUDIES = Path(__file__).parents[2] / "jobs" / "studies"


def smoke(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `tokendrop reproduce NAME --smoke --json` prints, of a narrow model and a small corpus."""
    capsys.readouterr()
    corpus = write_corpus(folder / "corpus.jsonl", documents(400))
    places = [f"runs_folder={folder / 'runs'}", f"data.folder={folder / 'shards'}", "track.uri="]
    small = [f"data.corpus=[{corpus}]", "data.tokenizer_vocab_size=300", "model.width=32", "model.heads=2"]
    main(["reproduce", name, "--studies", str(STUDIES), "--smoke", "--record", "--json", *places, *small])
    return json.loads(capsys.readouterr().out)


def test_a_study_is_trained_once_and_leaves_its_verdict_and_a_row_for_each_trial(tmp_path, ray_cluster, capsys):
    before = sorted((STUDIES / "verdicts").glob("*"))
    result = smoke("gpt_350m", tmp_path, capsys)
    folder = tmp_path / "runs" / "sweeps" / "small-gpt-random-ltd-smoke"
    kept = json.loads((folder / "gpt_350m.small.json").read_text())
    assert result["evidence"] == kept
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    losses = {trial["run"]: trial["summary"]["val_loss"] for trial in result["trials"]}
    assert {row["run"]: row["val_loss"] for row in rows} == losses
    assert [*kept["arm"], *kept["against"]] == [
        arm["by_seed"][seed] for arm in result["arms"][::-1] for seed in arm["by_seed"]
    ]
    assert kept["layer_tokens"][0] < kept["layer_tokens"][1]
    slopes = [one["summary"]["loss_slope"] for one in result["trials"] if one["values"] == result["arms"][0]["values"]]
    assert kept["loss_slope"] == pytest.approx(sum(slopes) / 2)
    assert kept["loss_slope"] < 0
    assert sorted((STUDIES / "verdicts").glob("*")) == before

    shared = smoke("growth", tmp_path, capsys)
    linear = next(arm for arm in shared["arms"] if arm["values"]["drop"]["schedule"]["kind"] == "linear")
    assert [*linear["by_seed"].values()] == kept["arm"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["two_thirds", "token_bypass", "regularization", "special_tokens"])
def test_other_kinds_of_studies_come_to_a_verdict(name, tmp_path, ray_cluster, capsys):
    assert smoke(name, tmp_path, capsys)["verdict"]["answer"] in ("agrees", "disagrees", "undecided")
