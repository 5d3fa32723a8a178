"""`tokendrop bench device` with compiled layers, as on a GPU."""

from dataclasses import replace

import pytest

from tokendrop.bench.device import SIZES, Wanted, bench_device


@pytest.mark.long
def test_layers_are_compiled_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By real inductor, with micro batches that grow; nothing of it is left out."""
    sizes = replace(SIZES["gpt-1m"], micro_batch=1, sequence_length=128, vocab_size=64)
    monkeypatch.setitem(SIZES, "gpt-1m", sizes)
    wanted = Wanted(presets=("gpt-1m",), minutes=60, precision="auto", rounds=3, compiled=True)
    result = bench_device(wanted, log=lambda _: None, save=lambda _: None)
    (model,) = result["models"]
    assert (model["compile"], result["compiled"], result["skipped"]) == (True, True, [])
    assert all(length["step_ms"]["min"] > 0 for length in model["lengths"].values())
