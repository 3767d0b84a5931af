"""What can go wrong for a user. Each message says what, where and the remedy, in at most three lines."""


class MesaTuneError(Exception):
    """Something that its reader can mend; the command line prints it and exits with `exit_status`."""

    exit_status = 1


class PolicyError(MesaTuneError, ValueError):
    """A policy that cannot be read, does not fit its model, or must not be overwritten."""


class WorkloadError(MesaTuneError):
    """A model file whose model, batch, loss or optimizer is missing, fails, or returns something unusable."""


class BudgetError(MesaTuneError):
    """A memory budget that is not an amount, or that no policy can meet."""


class RunError(MesaTuneError):
    """A run folder, profile or study that is missing, foreign or damaged; or a step that cannot run."""
