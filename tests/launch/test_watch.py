"""The live line says what the record of a run holds."""

from pathlib import Path

import pytest

from tokendrop.config.load import load_job
from tokendrop.launch.watch import LiveLine
from tokendrop.track.journal import MetricsTail, note_loss

JOBS = Path(__file__).parents[2] / "jobs" / "pretrain"


def test_the_live_line_tells_step_loss_speed_kept_length_saving_and_time_left(capsys: pytest.CaptureFixture[str]):
    config = load_job(JOBS / "bench.yaml", ["train.length=80 steps"])
    line, full = LiveLine(config), config.plan.layer_tokens_full
    report = {"val_loss": 5.5, "kept_length": 512, "step_time_s": 2.0, "world_size": 1}
    line.show({"attempt_from": 0, "world_size": 1})
    line.show({**report, "step": 40, "loss": 5.61234, "layer_tokens": full // 2})
    line.show({**report, "step": 41, "loss": 5.6, "layer_tokens": full // 2})  # too soon to be shown
    line.show({**report, "step": 80, "loss": 5.6, "val_loss": None, "layer_tokens": full * 3 // 4})
    assert capsys.readouterr().err.splitlines() == [
        "step 40/80  loss 5.612  val 5.500  2,048 tok/s  kept 512/512  layer tokens saved 0.0%  ETA 1:20",
        "step 80/80  loss 5.600  val 5.500  2,048 tok/s  kept 512/512  layer tokens saved 25.0%  ETA 0:00",
    ]
    line.show({"attempt_from": 40, "world_size": 2})
    assert capsys.readouterr().err == "restart  a worker was lost; 2 workers go on from step 40\n"


def test_what_workers_wait_for_is_said_soon_at_once_when_it_changes_and_else_once_a_minute(capsys, monkeypatch) -> None:
    """As a cluster would tell it, each second."""
    second = 0
    monkeypatch.setattr("tokendrop.launch.watch.time.monotonic", lambda: 1000.0 + second)
    asks, room = "waiting  for Ray Train to ask for 1 worker", "waiting  for room: 1 worker; {} of 4 CPUs are free"
    told = lambda *_: asks if second < 6 else room.format(second % 3)  # noqa: E731
    monkeypatch.setattr("tokendrop.launch.watch.waiting_text", told)
    line, said = LiveLine(load_job(JOBS / "bench.yaml")), {}
    line.show_waiting()
    line.wait()
    for second in range(140):
        line.show_waiting()
        if text := capsys.readouterr().err:
            said[second] = text.removesuffix("\n")
    assert said == {4: asks, 8: room.format(2), 68: room.format(2), 128: room.format(2)}
    line.show({"attempt_from": 0, "world_size": 1})
    second = 300
    line.show_waiting()
    assert not capsys.readouterr().err


def test_a_loss_is_told_with_its_cause_as_soon_as_it_is_in_the_record(tmp_path: Path, capsys) -> None:
    line = LiveLine(load_job(JOBS / "bench.yaml"))
    note_loss(tmp_path, "rank 1 (The actor died)")
    (noted,) = MetricsTail(tmp_path).read()
    line.show(noted)
    assert capsys.readouterr().err == "lost     a worker: rank 1 (The actor died)\n"
