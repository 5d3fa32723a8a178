"""`pytest --only-known-skips`: a skipped test that is not in known_skips.txt fails the session."""

from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-known-skips", action="store_true", help=f"fail where a test is skipped that is not in {LIST.name}"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if unknown_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if unknown := unknown_skips(config):
        terminalreporter.section(f"{len(unknown)} skipped, and not in tests/{LIST.name}", red=True)
        for line in unknown:
            terminalreporter.line(line)


def unknown_skips(config: pytest.Config) -> list[str]:
    """Skips of this session that are not in the list, each with its reason; none without the option."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("--only-known-skips"):
        return []
    known = read_list(LIST.read_text(encoding="utf-8"))
    skips = [(report.nodeid, reason_of(report)) for report in reporter.stats.get("skipped", [])]
    return [f"{test}: {reason}" for test, reason in skips if not is_known(test, reason, known)]


def read_list(text: str) -> list[tuple[str, str]]:
    """Tests, or `*` for any, and how the reasons of their skips begin."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(test, reason) for test, _, reason in (line.partition(": ") for line in lines)]


def is_known(test: str, reason: str, known: list[tuple[str, str]]) -> bool:
    """Args: test: its id; in the list it stands without parameters."""
    return any(where in ("*", test.partition("[")[0]) and bool(why) and reason.startswith(why) for where, why in known)


def reason_of(report: pytest.TestReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
