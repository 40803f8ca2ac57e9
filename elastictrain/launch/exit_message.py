"""What a launcher says to a person: what it waits for, and at its end what happened and what to type next. Pure."""

from elastictrain.errors import EXIT_CONFIG, EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_UNFIT, EXIT_USAGE
from elastictrain.launch.membership.decisions import Wait
from elastictrain.launch.saver import FinalSave


def waiting_message(wait: Wait, *, now_s: float) -> str:
    """One sentence."""
    if wait.until_s is None:
        return f"waiting for {wait.for_what}"
    return f"waiting for {wait.for_what}, for {max(0.0, wait.until_s - now_s):.0f} s at most"


def exit_message(code: int, reason: str, *, run_dir: str, final: FinalSave) -> str:
    """One paragraph: what happened, what is saved, what to type next."""
    reason = reason.removesuffix(".")
    saved = _saved(final, run_dir=run_dir)
    if code == EXIT_OK:
        return f"done: {reason}; {saved}."
    return f"stopped with exit code {code}: {reason}; {saved}. {_advice(code)}"


def _saved(final: FinalSave, *, run_dir: str) -> str:
    if final.committed_step is None:
        saved = f"{run_dir} does not answer, so what is saved there is unknown"
    elif final.committed_step:
        saved = f"step {final.committed_step} is saved in {run_dir}"
    else:
        saved = f"{run_dir} holds no step to go on from"
    if not final.unsaved_step:
        return saved
    if final.saver:
        how = f"the saver (process {final.saver}) goes on writing it to storage as long as this host or container lives"
    else:
        how = "nobody writes it to storage"
    return f"{saved}; step {final.unsaved_step} is in the memory of this host only, and {how}"


def _advice(code: int) -> str:
    match code:
        case _ if code == EXIT_STOPPED:
            return "The same command goes on from there."
        case _ if code in (EXIT_CONFIG, EXIT_USAGE):
            return "Trying again cannot help: change what the message names, then give the same command."
        case _ if code == EXIT_UNFIT:
            return "Mend or replace this host; the same command on another one goes on from there."
        case _ if code == EXIT_STORAGE:
            return "Mend what the messages name, and give the same command again."
    return "The events of the run and the output above tell more; the same command tries again from there."
