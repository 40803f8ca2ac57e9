"""Submits the run to Slurm from Python, through submitit: as slurm.sbatch does. Copy it, set the lines with <-, and

    python submitit_job.py

Where a program submits other jobs this way already; else slurm.sbatch is simpler. docs/clusters.md explains it.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

import submitit

RUN = [
    "recipe=llama_fsdp",
    "run.dir=s3://bucket/llama",  # <- or a folder that all hosts see
    "data.path=s3://bucket/tokens",  # <-
    "launch.min_hosts=1",
    "fault.notice_s=240",  # for saving, after the signal
]
CPUS = 64  # <- all of a host


def launch(arguments: list[str]) -> int:
    """One task for each host: its launcher, which gets this task's signals. After one, and 75, the job is requeued: Slurm ends
    it then. A host that stops by itself, for a notice of a cloud, leaves the job to the others."""
    launcher, received = subprocess.Popen([sys.executable, "-m", "elastictrain.launch", *arguments]), []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        launcher.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        # submitit's own handlers would end this task at once.
        signal.signal(number, pass_on)
    code = launcher.wait()
    if code == 75 and received:
        # It fails where another host, or Slurm, has requeued the job already, and says so.
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    if code:
        # What a function returns is a success for submitit and Slurm.
        sys.exit(code)
    return code


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
    executor.update_parameters(
        name="llama",
        nodes=4,  # <-
        tasks_per_node=1,
        gpus_per_node=8,  # <-
        cpus_per_task=CPUS,
        timeout_min=24 * 60,  # <-
        slurm_mem="0",
        slurm_signal_delay_s=300,  # SIGUSR2 so long before the end
        slurm_additional_parameters={"requeue": True, "no-kill": True},
        # srun does not take the number of CPUs from sbatch.
        slurm_srun_args=[f"--cpus-per-task={CPUS}", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"],
    )
    sys.stdout.write(f"{executor.submit(launch, RUN).job_id}\n")
