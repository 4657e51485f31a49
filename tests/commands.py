"""Commands of the documents, run as a user would."""

import os

_NOT_INHERITED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST", "FORCE_COLOR", "CLICOLOR_FORCE"),
    *("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "PLATFORM", "TESTS", "JOBS", "EXTRAS", "BENCH"),
)


def command_environment(**variables):
    """The caller's environment without what a test process, a terminal or `make test ARGS=...` adds to it."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**inherited, "CI": "true", "GLOO_SOCKET_IFNAME": "lo", "HYPER_PARALLEL_PLATFORM": "torch", **variables}
