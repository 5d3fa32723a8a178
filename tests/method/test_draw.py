"""Which tokens are kept: uniform, and a function of seed, step, sample and layer alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokendrop.method.draw import DrawContext, draw_positions

LENGTH, KEPT = 16, 5


def drawn(
    *,
    seed: int = 0,
    step: int = 0,
    ids: Tensor | None = None,
    layers: tuple[int, ...] = (1,),
    kept: tuple[int, ...] | None = None,
    length: int = LENGTH,
) -> list[Tensor]:
    ids_B = torch.arange(1) if ids is None else ids
    context = DrawContext(seed=seed, step=step, sample_ids_B=ids_B, sequence_length=length)
    return draw_positions(context, layers, kept or (KEPT,) * len(layers))


@st.composite
def draws(draw: st.DrawFn) -> dict:
    length = draw(st.integers(1, 70))
    layers = tuple(draw(st.lists(st.integers(0, 100), min_size=1, max_size=5, unique=True)))
    return {
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "step": draw(st.integers(0, 10**9)),
        "ids": torch.tensor(draw(st.lists(st.integers(0, 2**60), min_size=1, max_size=6))),
        "layers": layers,
        "kept": tuple(draw(st.integers(1, length)) for _ in layers),
        "length": length,
    }


@given(draws())
def test_kept_positions_are_distinct_ascending_and_as_many_as_asked(case: dict) -> None:
    for positions_BK, kept in zip(drawn(**case), case["kept"], strict=True):
        assert positions_BK.shape == (len(case["ids"]), kept)
        assert positions_BK.dtype == torch.int64
        assert bool((positions_BK.diff(dim=1) > 0).all())
        assert 0 <= int(positions_BK.min()) <= int(positions_BK.max()) < case["length"]


@given(draws())
def test_at_full_length_every_position_is_kept(case: dict) -> None:
    case["kept"] = (case["length"],) * len(case["layers"])
    for positions_BK in drawn(**case):
        assert torch.equal(positions_BK, torch.arange(case["length"]).expand_as(positions_BK))


@given(draws(), st.randoms(use_true_random=False))
def test_a_samples_draw_does_not_depend_on_its_batch(case: dict, random) -> None:
    order = random.sample(range(len(case["ids"])), k=random.randint(1, len(case["ids"])))
    part = drawn(**(case | {"ids": case["ids"][order]}))
    for of_part_BK, of_all_BK in zip(part, drawn(**case), strict=True):
        assert torch.equal(of_part_BK, of_all_BK[order])


@given(draws(), st.data())
def test_a_layers_draw_does_not_depend_on_the_other_layers(case: dict, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(case["layers"]) - 1))
    alone = drawn(**(case | {"layers": (case["layers"][number],), "kept": (case["kept"][number],)}))
    assert torch.equal(alone[0], drawn(**case)[number])


MANY = 4000
AXES = {
    "sample": lambda: drawn(ids=torch.arange(MANY))[0],
    "distant sample": lambda: drawn(ids=torch.arange(MANY) * 2**33)[0],
    "step": lambda: torch.cat([drawn(step=step)[0] for step in range(MANY)]),
    "layer": lambda: torch.cat(drawn(layers=tuple(range(MANY)))),
    "seed": lambda: torch.cat([drawn(seed=seed)[0] for seed in range(MANY)]),
}


@pytest.fixture(params=AXES, scope="module")
def along_one_axis(request: pytest.FixtureRequest) -> Tensor:
    """Draws that differ in one thing alone, which counts up; (N, K)."""
    return AXES[request.param]()


def is_kept(positions_NK: Tensor) -> Tensor:
    return torch.zeros(len(positions_NK), LENGTH, dtype=torch.float64).scatter(1, positions_NK, 1.0)


def test_every_position_is_kept_equally_often(along_one_axis: Tensor) -> None:
    """Chi-square with LENGTH - 1 = 15 degrees of freedom; a fair draw exceeds 60 once in three million times."""
    share = KEPT / LENGTH
    counts = is_kept(along_one_axis).sum(0)
    spread = MANY * share * (1 - share) * LENGTH / (LENGTH - 1)
    assert float(((counts - MANY * share) ** 2 / spread).sum()) < 60


def test_every_pair_of_positions_is_kept_together_equally_often(along_one_axis: Tensor) -> None:
    kept = is_kept(along_one_axis)
    share = KEPT * (KEPT - 1) / (LENGTH * (LENGTH - 1))
    together = (kept.T @ kept)[tuple(torch.triu_indices(LENGTH, LENGTH, offset=1))]
    deviations = (together - MANY * share) / (MANY * share * (1 - share)) ** 0.5
    assert float(deviations.abs().max()) < 5
    assert float(deviations.square().mean()) < 1.5


def test_neighbouring_draws_overlap_no_more_than_chance(along_one_axis: Tensor) -> None:
    """The overlap of two fair draws is hypergeometric; its mean over many pairs stays within five deviations."""
    kept = is_kept(along_one_axis)
    share = KEPT / LENGTH
    variance = KEPT * share * (1 - share) * (LENGTH - KEPT) / (LENGTH - 1)
    overlaps = (kept[:-1] * kept[1:]).sum(1)
    assert abs(float(overlaps.mean()) - KEPT * share) < 5 * (variance / len(overlaps)) ** 0.5
    assert float(overlaps.var()) == pytest.approx(variance, rel=0.15)


def test_seed_step_sample_and_layer_each_change_the_draw() -> None:
    one = {"seed": 5, "step": 7, "ids": torch.tensor([11]), "layers": (3,), "kept": (32,), "length": 64}
    others = [{"seed": 6}, {"step": 8}, {"ids": torch.tensor([12])}, {"layers": (4,)}]
    swapped = [
        {"seed": 7, "step": 5},
        {"step": 11, "ids": torch.tensor([7])},
        {"layers": (11,), "ids": torch.tensor([3])},
    ]
    all_draws = [drawn(**(one | change))[0] for change in [{}, *others, *swapped]]
    assert len({tuple(positions.flatten().tolist()) for positions in all_draws}) == len(all_draws)


@pytest.mark.parametrize("kept", [0, -1, LENGTH + 1])
def test_a_kept_length_out_of_range_is_refused(kept: int) -> None:
    with pytest.raises(ValueError, match="want kept lengths in 1"):
        drawn(kept=(kept,))
