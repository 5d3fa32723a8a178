"""A pass through each shape that a run still has, before its first step: so no step waits for the compiler."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.models.batch import Batch
from tokendrop.models.layer import recompute_layers
from tokendrop.schedule.plan import Segment
from tokendrop.schedule.shapes import distinct
from tokendrop.train.dropping import draw
from tokendrop.train.loop import Batches, TrainComponents, micro_batches

_PASSES_TO_RECORD = 2  # of a CUDA graph: it runs once without


def warm_up(config: ExperimentConfig, components: TrainComponents, *, start: int) -> None:
    """Run forward and backward once for each micro batch and kept length from step `start` on, and evaluate.

    All workers run the same, on samples of that step, and nothing of it stays: no gradient, no score, no random state,
    and the next micro batch has a draw of its own. Where graphs are not static, those that Dynamo makes of any number
    of tokens take two kept lengths, and one more is run for what it holds to be special.
    """
    plan, engine = components.plan(config), components.engine
    kinds = distinct(plan, start=start, world_size=components.world_size)
    if config.train.compile != "static":
        kinds = _ends(kinds)
    if not kinds:
        return
    passes = _PASSES_TO_RECORD if engine.cuda_graphs else 1
    together = max(size for size, _ in kinds) // config.train.micro_batch
    rows = _Rows(rows=list(islice(components.batches.of_step(start), together)), of=components.batches)
    held = replace(components, batches=rows)
    engine.model.train()
    with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
        for size, segment in kinds:
            batch, _ = next(micro_batches(config, held, start, segment.kept_length, size=size))
            if components.dropping is not None:
                kept, scores = segment.kept_by_route, components.scores
                draw(config, plan, components.dropping, batch, step=start, kept=kept, scores=scores)
            recompute_layers(engine.model, again=segment.recomputes)
            for _ in range(passes):
                # no share of the loss: what a strategy may hold on to beside the gradients is zero too
                engine.forward_backward(batch, share=0.0, last_micro_batch=False)
        # before FSDP gathers weights for an evaluation, after which it would be the gathered ones' that are forgotten
        engine.model.zero_grad(set_to_none=not engine.cuda_graphs)
        held_out = components.batches.validation()
        for place in sorted({0, len(held_out) - 1}):  # the last batch may be a smaller one
            for _ in range(passes):
                engine.evaluate(held_out[place][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """`Batches` of one step, read once: a stream of samples would begin anew for each reading."""

    rows: Sequence[Batch]
    of: Batches

    def of_step(self, step: int) -> Iterator[Batch]:
        return iter(self.rows)

    def validation(self) -> Sequence[tuple[Batch, int]]:
        return self.of.validation()


def _ends(kinds: Sequence[tuple[int, Segment]]) -> Sequence[tuple[int, Segment]]:
    """The first two and the last of each size, and of layers that are computed again and that are not."""
    alike: dict[tuple[int, bool], list[tuple[int, Segment]]] = {}
    for size, segment in kinds:
        alike.setdefault((size, segment.recomputes), []).append((size, segment))
    return [one for some in alike.values() for one in dict.fromkeys([*some[:2], some[-1]])]
