import pytest

from elastictrain.launch.final_save import FinalSave, WaitingMessages, exit_message
from elastictrain.launch.membership.records import Wait


@pytest.mark.parametrize(
    ("wait", "sentence"),
    [
        (Wait("2 hosts"), "waiting for 2 hosts"),
        (Wait("2 hosts", 130.0), "waiting for 2 hosts, for 30 s at most"),
        (Wait("2 hosts", 90.0), "waiting for 2 hosts, for 0 s at most"),
    ],
)
def test_what_is_waited_for(wait: Wait, sentence: str) -> None:
    printed: list[str] = []
    messages = WaitingMessages(printed.append)
    for now_s in (98.0, 99.0, 100.0, 101.0):
        messages.show(wait, now_s=now_s)
    assert printed == [sentence], "it is printed once, after a while"
    messages.forget()
    messages.show(wait, now_s=100.0)
    assert printed == [sentence] * 2


def test_the_end_of_a_run() -> None:
    assert (
        exit_message(0, "the last step is done", run_dir="s3://bucket/run", final=FinalSave(400))
        == "done: the last step is done; step 400 is saved in s3://bucket/run."
    )


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (75, "The same command continues from there."),
        (78, "Trying again cannot help: change what the message names, then give the same command."),
        (64, "Trying again cannot help: change what the message names, then give the same command."),
        (69, "Mend or replace this host; the same command on another one continues from there."),
        (70, "The events of the run and the output above tell more; the same command tries again from there."),
        (74, "Mend what the messages name, and give the same command again."),
    ],
)
def test_what_to_type_next(code: int, advice: str) -> None:
    paragraph = exit_message(code, "why", run_dir="runs/x", final=FinalSave(12))
    assert paragraph == f"stopped with exit code {code}: why; step 12 is saved in runs/x. {advice}"


def test_nothing_is_saved_yet() -> None:
    assert "; runs/x holds no step to continue from. " in exit_message(75, "why", run_dir="runs/x", final=FinalSave(0))


@pytest.mark.parametrize(
    ("final", "says"),
    [
        (FinalSave(None), "; runs/x does not answer, so what is saved there is unknown. "),
        (
            FinalSave(30, 40, 4242),
            "; step 30 is saved in runs/x; step 40 is in the memory of this host only, and the saver (process 4242) ",
        ),
        (
            FinalSave(0, 40),
            "; runs/x holds no step to continue from; step 40 is in the memory of this host only, and nobody writes it",
        ),
    ],
)
def test_what_is_not_saved_is_said_too(final: FinalSave, says: str) -> None:
    assert says in exit_message(75, "why", run_dir="runs/x", final=final)
