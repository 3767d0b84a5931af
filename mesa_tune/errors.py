"""Errors that a user can cause. A message says what, where, and the remedy, in three lines at most."""


class MesaTuneError(Exception):
    """Error that the user can fix. The command line prints it and exits with `exit_status`."""

    exit_status = 1


class PolicyError(MesaTuneError, ValueError):
    """A policy file cannot be read or overwritten, or a policy is invalid or does not fit its model."""


class WorkloadError(MesaTuneError):
    """A model, batch, loss or optimizer function is missing, raises, or returns something unusable."""


class BudgetError(MesaTuneError):
    """A memory budget is not an amount, or no policy can meet it."""


class RunError(MesaTuneError):
    """A run folder, profile or study is missing, damaged or of another origin, or a step cannot run."""


class MissingPackageError(MesaTuneError, ImportError):
    """A package that only this part of mesa-tune needs is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"{what} needs {package}, which cannot be imported\ninstall it: pip install {package}"
        )
