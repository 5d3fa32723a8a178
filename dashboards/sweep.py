"""The trials of a sweep, and how good they are."""

from queries import Board, Panel, named


def of_sweep(metric: str, by: str) -> str:
    """A metric of the chosen sweeps."""
    return f'max by ({by}) ({named(metric)}{{sweep=~"$sweep"}})'


def of_trials(metric: str) -> str:
    """A metric of the trials that run, of the chosen sweeps."""
    return f'max by (sweep, run) ({named(metric)}{{sweep=~"$sweep", sweep!=""}})'


BOARD = Board(
    name="sweep",
    title="tokendrop: sweep",
    sweeps_of="sweep/trials",
    runs_of=None,
    rows=(
        (
            "The sweep",
            (
                Panel(
                    title="Trials by state",
                    about="Of the command that trains the sweep.",
                    unit="short",
                    queries=(("{{sweep}} {{state}}", of_sweep("sweep/trials", "sweep, state")),),
                    kind="stacked",
                ),
                Panel(
                    title="Best arm so far",
                    about="By the sweep's metric, of arms whose seeds have all ended well.",
                    queries=(("{{sweep}} {{metric}}", of_sweep("sweep/best", "sweep, metric")),),
                ),
            ),
        ),
        (
            "Trials that run",
            (
                Panel(
                    title="Training loss",
                    about="Nats per token.",
                    queries=(("{{run}}", of_trials("loss/train")),),
                ),
                Panel(
                    title="Validation loss",
                    about="At the last validation.",
                    queries=(("{{run}}", of_trials("loss/validation")),),
                ),
                Panel(
                    title="Done",
                    about="Steps, of those of the plan.",
                    unit="percentunit",
                    queries=(("{{run}}", f"{of_trials('progress/step')} / {of_trials('progress/steps')}"),),
                ),
                Panel(
                    title="Workers",
                    about="Of all trials of a sweep.",
                    unit="short",
                    queries=(("{{sweep}}", f"sum by (sweep) ({of_trials('schedule/world_size')})"),),
                ),
            ),
        ),
    ),
)
