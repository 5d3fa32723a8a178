# %% [markdown]
# # Held-out loss over layer tokens
#
# A notebook for VS Code or Jupytext, and a script: `python jobs/examples/held_out_loss.py`, in the folder that has
# `runs/`. It wants `pip install 'tokendrop[report]'`.

# %%
import altair as alt
import numpy as np
import pyarrow.compute as pc

from tokendrop import results

loaded = results.load("runs/*")
print(loaded)

# %% [markdown]
# `loaded.steps` and `loaded.summaries` are tables of pyarrow; `.to_pandas()` makes frames of them. A summary has what
# the run came to, and all keys of its job.

# %%
for row in loaded.summaries.select(["name", "seed", "drop.method", "val_loss", "layer_token_saving"]).to_pylist():
    print(row)

# %% [markdown]
# ## At equal cost
#
# The loss of each run where it has spent the layer tokens that every run has spent, on the line between two
# validations; nan where that is before its first one.

# %%
validated = loaded.steps.filter(pc.field("val_loss").is_valid())
curves = {run: validated.filter(pc.field("run") == run) for run in dict.fromkeys(validated["run"].to_pylist())}
layer_tokens = min(curve["layer_tokens"][-1].as_py() for curve in curves.values())
at_equal_cost = {
    run: float(np.interp(layer_tokens, curve["layer_tokens"].to_numpy(), curve["val_loss"].to_numpy(), left=np.nan))
    for run, curve in curves.items()
}
print(f"at {layer_tokens:,} layer tokens:")
for run, loss in sorted(at_equal_cost.items(), key=lambda item: item[1]):
    print(f"{loss:8.3f}  {run}")

# %% [markdown]
# ## All of it

# %%
chart = (
    alt.Chart(validated, title="Held-out loss over layer tokens", width=480)
    .mark_line(point=True)
    .encode(
        x=alt.X("layer_tokens:Q", title="layer tokens"),
        y=alt.Y("val_loss:Q", title="held-out loss, nats per token").scale(zero=False),
        color=alt.Color("name:N", title="job"),
        detail="run:N",
    )
)
chart.save("held_out_loss.svg")
chart  # noqa: B018  # pyright: ignore[reportUnusedExpression] - a notebook draws it
