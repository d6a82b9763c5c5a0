"""A plugin of pytest: each failure is printed when it happens, and how long each test took.

What runs on a lent machine may be ended before pytest's summary.
"""

from __future__ import annotations

import pytest


class Teller:
    """Writes to pytest's own terminal reporter."""

    def __init__(self, config: pytest.Config):
        self._terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each phase of a test."""
        if self._terminal is None or (report.when != "call" and report.passed):
            return
        self._terminal.write_line(f"\n{report.nodeid}: {report.outcome}, {report.duration:.1f} s")
        if report.failed:
            self._terminal.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)  # the terminal reporter is there by then
def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest."""
    config.pluginmanager.register(Teller(config))
