"""The benchmark: data sets, protocols, runner, statistics and report."""
