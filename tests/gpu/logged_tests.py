"""Plugin of pytest that writes each test's outcome at once, as one line of JSON: ``-p tests.gpu.logged_tests``."""

import json
import os

LOG = "tests.jsonl"
"""Name of the file, and of the environment variable with its path."""


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        content = {
            "id": report.nodeid,
            "outcome": report.outcome,
            "when": report.when,
            "seconds": round(report.duration, 2),
        }
        with open(os.environ[LOG], "a") as file:
            file.write(json.dumps(content) + "\n")
