"""A picture of a run whose workers follow its plan."""

from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

from tokendrop.track.journal import read_steps

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1661f", "#6b6b6b"


def draw_run(run: Path, picture: Path) -> None:
    """Draw workers, kept length and loss of a run over its steps, to a file of any format that matplotlib knows."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "tokendrop"  # the same run, the same file
    from matplotlib import pyplot as plt

    rows = read_steps(run)
    steps = [row["step"] for row in rows]
    figure, panels = plt.subplots(3, 1, sharex=True, figsize=(7, 5), height_ratios=[1, 1, 2], layout="constrained")
    held_out = [(row["step"], row["val_loss"]) for row in rows if row["val_loss"] is not None]
    panels[0].step(steps, [row["world_size"] for row in rows], where="post", color=_BLUE)
    panels[0].set_ylim(bottom=0)
    panels[0].locator_params(axis="y", integer=True)
    panels[1].step(steps, [row["kept_length"] for row in rows], where="post", color=_BLUE)
    panels[1].set_ylim(bottom=0)
    panels[2].plot(steps, [row["loss"] for row in rows], color=_BLUE, linewidth=0.8, label="training, tokens dropped")
    panels[2].plot(*zip(*held_out, strict=True), "o-", color=_ORANGE, label="held out, none dropped")
    panels[2].legend(frameon=False)
    panels[2].set_xlabel("step")
    changes = [now["step"] - 0.5 for before, now in pairwise(rows) if before["world_size"] != now["world_size"]]
    for panel, name in zip(panels, ("workers", "kept length", "loss"), strict=True):
        panel.set_ylabel(name)
        panel.spines[["top", "right"]].set_visible(False)
        for step in changes:
            panel.axvline(step, color=_GREY, linestyle=":", linewidth=1)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    plt.close(figure)
