"""Pipeline parallelism: schedules as tables that are data, simulated and proven before anything runs."""
