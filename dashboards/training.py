"""What a run learns, and how fast."""

from queries import Board, Panel, line, of_run, per_second

BOARD = Board(
    name="training",
    title="tokendrop: training",
    rows=(
        (
            "Now",
            (
                Panel(
                    title="Done",
                    about="Steps done, of those of the plan.",
                    unit="percentunit",
                    queries=(("{{run}}", f"{of_run('progress/step')} / {of_run('progress/steps')}"),),
                    kind="value",
                ),
                Panel(
                    title="Validation loss",
                    about="At the last validation, no token dropped.",
                    queries=(line("loss/validation"),),
                    kind="value",
                ),
                Panel(
                    title="Layer tokens saved",
                    about="So far, over all layers.",
                    unit="percentunit",
                    queries=(line("progress/layer_token_saving"),),
                    kind="value",
                ),
                Panel(
                    title="Checkpoint",
                    about="Age of the newest committed one.",
                    unit="s",
                    queries=(line("checkpoint/age_s"),),
                    kind="value",
                ),
            ),
        ),
        (
            "What is learned",
            (
                Panel(
                    title="Loss",
                    about="Nats per token: of training, and on the held-out rows.",
                    queries=(line("loss/train", "{{run}} training"), line("loss/validation", "{{run}} validation")),
                ),
                Panel(
                    title="Gradient norm",
                    about="Before clipping.",
                    queries=(line("training/grad_norm"),),
                    log=True,
                ),
                Panel(
                    title="Kept length",
                    about="Tokens of a sequence that a dropped layer sees.",
                    unit="short",
                    queries=(line("schedule/kept_length"),),
                ),
                Panel(
                    title="Learning rate",
                    about="Of the last step.",
                    unit="sci",
                    queries=(line("schedule/learning_rate"),),
                ),
                Panel(
                    title="Tokens and layer tokens",
                    about="Consumed so far, over all workers.",
                    unit="short",
                    queries=(
                        line("progress/tokens", "{{run}} tokens"),
                        line("progress/layer_tokens", "{{run}} layer tokens"),
                    ),
                ),
            ),
        ),
        (
            "How fast",
            (
                Panel(
                    title="Tokens per second",
                    about="Over the last steps, all workers together.",
                    unit="short",
                    queries=(line("speed/tokens_per_s"),),
                ),
                Panel(
                    title="FLOP/s of a worker",
                    about="By the plan's count. MFU is this over what the device could do.",
                    unit="short",
                    queries=(("{{run}}", f"{of_run('speed/flops_per_s')} / {of_run('schedule/world_size')}"),),
                ),
                Panel(
                    title="Parts of the steps",
                    about="Seconds a second of this driver's life: waiting for data, the rest of the steps, changes of"
                    " workers. What is missing to 1 is start-up, restarts, validation and checkpoints.",
                    unit="percentunit",
                    queries=(
                        ("{{run}} data", per_second("time/data_s")),
                        (
                            "{{run}} compute and exchange",
                            f"{per_second('time/steps_s')} - {per_second('time/data_s')}",
                        ),
                        ("{{run}} changes of workers", per_second("time/pauses_s")),
                    ),
                    kind="stacked",
                ),
                Panel(
                    title="Since the last step",
                    about="Until training is over.",
                    unit="s",
                    queries=(line("time/since_step_s"),),
                ),
                Panel(
                    title="Free where the run folder lies",
                    about="Share of the disk.",
                    unit="percentunit",
                    queries=(("{{run}}", f"{of_run('disk/free_bytes')} / {of_run('disk/size_bytes')}"),),
                ),
            ),
        ),
    ),
)
