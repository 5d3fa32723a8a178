"""Preparation of token shards, and how long training waits for data."""

from queries import Board, Panel, named, of_run, per_second


def prepared(metric: str) -> str:
    """What preparations do in a second."""
    return f"sum by (job_name) (deriv({named(metric)}[$__rate_interval]))"


BOARD = Board(
    name="data",
    title="tokendrop: data",
    rows=(
        (
            "Preparation of token shards",
            (
                Panel(
                    title="Documents per second",
                    about="Read by the preparation of a job's corpus.",
                    unit="short",
                    queries=(("{{job_name}}", prepared("prepare/documents")),),
                ),
                Panel(
                    title="Tokens per second",
                    about="Committed by the preparation of a job's corpus.",
                    unit="short",
                    queries=(("{{job_name}}", prepared("prepare/tokens")),),
                ),
                Panel(
                    title="Documents and tokens",
                    about="So far.",
                    unit="short",
                    queries=(
                        ("{{job_name}} documents", f"max by (job_name) ({named('prepare/documents')})"),
                        ("{{job_name}} tokens", f"max by (job_name) ({named('prepare/tokens')})"),
                    ),
                ),
            ),
        ),
        (
            "Waiting",
            (
                Panel(
                    title="Share of the steps spent waiting for data",
                    about="By rank 0.",
                    unit="percentunit",
                    queries=(("{{run}}", f"{per_second('time/data_s')} / ({per_second('time/steps_s')} > 0)"),),
                ),
                Panel(
                    title="Waiting of each worker",
                    about="Seconds of the last step; of runs of up to 64 workers, or with track.ranks.",
                    unit="s",
                    queries=(("{{run}} rank {{rank}}", of_run("rank/data_time_s", by="run, rank")),),
                ),
                Panel(
                    title="Step time of each worker",
                    about="Seconds of the last step.",
                    unit="s",
                    queries=(("{{run}} rank {{rank}}", of_run("rank/step_time_s", by="run, rank")),),
                ),
            ),
        ),
    ),
)
