"""One Ray for the whole test session, and the real data where it is at hand."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from known_skips import pytest_addoption, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 - hooks
from time_left import pytest_runtest_setup  # noqa: F401 - a hook
from tokendrop.launch.loopback import close_to_others

close_to_others()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs, and by what tests start there
settings.register_profile("default", deadline=None, max_examples=50)
settings.load_profile("default")


BESIDE = Path(__file__).parents[2] / "shared" / "data"
"""Of the checkout, wherever that is."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this session's own, with room for four workers of one core."""
    import ray

    from tokendrop.launch.cluster import connect
    from tokendrop.launch.head_watch import HeadWatch

    def fail(watch: HeadWatch, error: OSError) -> None:
        """Where a command would end, the one test that wanted this Ray should, and not the whole session, unsaid."""
        raise error

    HeadWatch._exit = fail
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # so soon a run's end is seen
    connect(cpus=4)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with MLflow's empty tables, which it takes seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def sqlite(tmp_path: Path, mlflow_tables: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty MLflow in the test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def real_data() -> Path:
    """The folder of real data (see its MANIFEST.md); tests that want it skip where it is missing."""
    named = os.environ.get("TOKENDROP_TEST_DATA", str(BESIDE))
    if not named:
        pytest.skip("TOKENDROP_TEST_DATA is empty")
    if not Path(named).is_dir():
        pytest.skip(f"no real data at {named}; set TOKENDROP_TEST_DATA to its folder, or to nothing")
    return Path(named)


@pytest.fixture
def complaint(capfd):
    """What a command says when it ends with exit code 2, after `tokendrop: `."""

    from tokendrop.cli.main import main

    def said(*arguments: object) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert end.value.code == 2, err
        assert out == ""
        assert err.endswith("\n")
        *before, line = err.splitlines()
        assert all(one.startswith(("connect  ", "prepare  ", "start    ")) for one in before), err
        assert line.startswith("tokendrop: ")
        return line.removeprefix("tokendrop: ")

    return said
