"""The fixtures of a small runner."""

from harness.small_runner import depot, drive, make_driver, new_world, one_thread, small_config, world  # noqa: F401 (fixtures)
