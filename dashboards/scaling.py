"""Workers and nodes, what their changes cost, and a run against its plan."""

from queries import Board, Panel, line, of_run

BOARD = Board(
    name="scaling",
    title="tokendrop: scaling",
    rows=(
        (
            "Workers",
            (
                Panel(
                    title="Workers",
                    about="Those that did the last step, and those that the plan has for the next one.",
                    unit="short",
                    queries=(
                        line("schedule/world_size", "{{run}}"),
                        line("schedule/planned_workers", "{{run}} planned"),
                    ),
                ),
                Panel(
                    title="Nodes",
                    about="Nodes of the cluster and their CPUs, as Ray's agents tell of them.",
                    unit="short",
                    queries=(("nodes", "count(ray_node_mem_total)"), ("CPUs", "sum(ray_node_cpu_count)")),
                ),
                Panel(
                    title="Restarts, lost workers, changes of workers",
                    about="Since the driver began.",
                    unit="short",
                    queries=(
                        line("events/restarts", "{{run}} restarts"),
                        line("events/lost", "{{run}} failures of workers"),
                        line("events/resizes", "{{run}} changes by plan"),
                    ),
                ),
            ),
        ),
        (
            "What changes cost",
            (
                Panel(
                    title="Pauses by their parts",
                    about="Seconds since the driver began, all changes of workers together.",
                    unit="s",
                    queries=(("{{run}} {{part}}", of_run("resize/part_s", by="run, part")),),
                    kind="stacked",
                ),
                Panel(
                    title="Mean pause",
                    about="Of a change of workers, from the last step before it to the first one after.",
                    unit="s",
                    queries=(("{{run}}", f"{of_run('time/pauses_s')} / ({of_run('events/resizes')} > 0)"),),
                ),
            ),
        ),
        (
            "Against the plan: of jobs with a profile",
            (
                Panel(
                    title="Worker-hours",
                    about="GPU-hours, where a worker has a GPU: since the driver began, and by the profile.",
                    unit="h",
                    queries=(
                        line("cost/worker_hours", "{{run}}"),
                        line("cost/planned_worker_hours", "{{run}} planned"),
                    ),
                ),
                Panel(
                    title="Cost",
                    about="Worker-hours at the profile's price, where it has one.",
                    unit="currencyUSD",
                    queries=(line("cost/usd", "{{run}}"), line("cost/planned_usd", "{{run}} planned")),
                ),
                Panel(
                    title="Behind the plan",
                    about="Below 0: ahead of it.",
                    unit="s",
                    queries=(line("plan/behind_s"),),
                ),
            ),
        ),
    ),
)
