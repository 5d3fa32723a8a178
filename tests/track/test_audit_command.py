"""`tokendrop data audit`: what it reports, and what it can't audit."""

import json
import shutil

import pytest

from ledgers import make_run, take, with_ledger
from mutations import flip_bit, truncate
from tokendrop.cli.main import main
from tokendrop.data.shards.format import SHARDS
from tokendrop.errors import UserError
from tokendrop.track.audit import audit
from tokendrop.track.journal import LEDGER
from tokendrop.track.run_folder import DATA, JOB
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed, step_of, write_meta
from tokendrop.train.sealed import seal_text


@pytest.mark.parametrize(
    ("spoil", "message", "code"),
    [
        (lambda run: (run / JOB).unlink(), "not a run folder", 2),
        (lambda run: shutil.rmtree(run / CHECKPOINTS), "want a run folder with a committed checkpoint", 2),
        (lambda run: shutil.rmtree(run / "data"), "its order of samples can't be known without manifest.json", 2),
        (lambda run: truncate(run / JOB, 0.5), r"job\.yaml: damaged \(it ends without a checksum\)", 1),
        (lambda run: flip_bit(run / DATA, 0.1), r"data\.txt: damaged \(its checksum is another one\)", 1),
        (lambda run: [one.write_text("{") for one in run.glob("checkpoints/*/meta.json")], "no other checkpoint", 1),
        (lambda run: (run / "data" / SHARDS).write_text("{\n"), "damaged", 1),
        (lambda run: sorted((run / LEDGER).iterdir())[3].write_bytes(b"PAR1"), "this part of the ledger is damaged", 1),
        (lambda run: (run / LEDGER / "more.parquet").write_bytes(b""), "not a part of a ledger", 1),
    ],
    ids=["no job", "no checkpoint", "no shards", "half a job", "place", "checkpoints", "manifest", "part", "name"],
)
def test_what_can_not_be_audited_is_named_in_one_sentence(tmp_path, resized, capsys, spoil, message, code):
    run = with_ledger(resized, tmp_path / "run", lambda tables: None)
    (run.folder / DATA).write_text(seal_text(f"{run.folder / 'data'}\n"))
    spoil(run.folder)
    with pytest.raises(UserError, match=message) as refused:
        audit(run.folder)
    with pytest.raises(SystemExit) as ended:
        main(["data", "audit", str(run.folder)])
    assert ended.value.code == refused.value.exit_code == code
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1


def test_the_weights_of_a_checkpoint_are_not_read_for_its_step(tmp_path):
    run = make_run(tmp_path, rows=(40,), window=32)
    run.attempt(1, start=0)
    clean = audit(tmp_path)
    newest = committed(tmp_path / CHECKPOINTS)[-1]
    weights = newest / "weights.bin"
    weights.write_bytes(b"as they were")
    write_meta(newest, {"step": step_of(newest)}, {weights.name: "0" * 64})  # whose checksum no reader would pass
    assert audit(tmp_path) == clean
    weights.write_bytes(b"cut")
    assert audit(tmp_path).steps == step_of(newest) - 3  # one that is cut is passed over, as by a run that goes on


def test_shards_that_are_being_made_anew_are_named_where_they_do_not_reach(tmp_path):
    run = make_run(tmp_path, rows=(40,), window=32)
    run.attempt(1, start=0)
    tree = json.loads((tmp_path / "data" / "manifest.json").read_text())
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({**tree, "is_complete": False, "rows": []}))
    with pytest.raises(UserError, match="is not prepared as far as step 6"):
        audit(tmp_path)


def test_the_command_reports_and_its_exit_code_tells(tmp_path, resized, capsys):
    main(["data", "audit", str(resized.folder)])
    assert "4-6             1\n" in (said := capsys.readouterr().out)
    assert said.endswith("Exact: steps 1 to 12 have each of their 96 samples once.\n")
    main(["data", "audit", str(resized.folder), "--json"])
    clean = json.loads(capsys.readouterr().out)
    assert {key: clean[key] for key in ("samples", "missing", "repeated")} == {
        "samples": 96,
        "missing": 0,
        "repeated": 0,
    }

    run = with_ledger(resized, tmp_path / "run", lambda tables: take(tables, (5, 0))[0].pop(0))
    with pytest.raises(SystemExit) as ended:
        main(["data", "audit", str(run.folder)])
    assert ended.value.code == 1
    sample = resized.ids_of(5)[0]
    assert f"Not exact: 1 missing, 0 repeated, in step 5: step 5 lacks sample {sample}." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["data", "audit", str(run.folder), "--json"])
    faulty = json.loads(capsys.readouterr().out)
    assert faulty["where"] == [{"step": 5, "sample_id": sample, "what": "missing"}]
