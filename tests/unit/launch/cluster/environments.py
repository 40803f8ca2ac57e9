"""Environments as the documents of each cluster describe them: the variables that its version sets, with values of one job.

Sources: Slurm's sbatch(1), srun(1) and heterogeneous_jobs (20.11, 23.11, 25.05); Kubeflow training operator 1.5 and 1.9,
`envvar.go` and `elastic.go`; Kubeflow trainer 2.1, the torch plugin; Kubernetes, "Indexed Job"; Run:ai 2.16 and 2.24,
environment variables inside a workload, and 2.18 as its users describe it; docs.vast.ai, docker environment and multi-node
training.
"""

SHELL = {"PATH": "/usr/bin:/bin", "HOME": "/home/ada", "LANG": "C.UTF-8", "HOSTNAME": "box"}

# sbatch --nodes=4 --ntasks-per-node=1 --gpus-per-node=8, then srun: the third task. Slurm 23.11.
SLURM_TASK_PER_NODE = SHELL | {
    "ENVIRONMENT": "BATCH",
    "SLURM_CLUSTER_NAME": "ada",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_CPUS_PER_TASK": "96",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_GPUS_PER_NODE": "8",
    "SLURM_GTIDS": "2",
    "SLURM_JOBID": "200505",
    "SLURM_JOB_CPUS_PER_NODE": "96(x4)",
    "SLURM_JOB_END_TIME": "1900003600",
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NAME": "llama",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_PARTITION": "long",
    "SLURM_JOB_START_TIME": "1900000000",
    "SLURM_LAUNCH_NODE_IPADDR": "10.4.0.10",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gnode[10,20,25,37]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_TASK_PID": "16360",
    "SLURMD_NODENAME": "gnode25",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}

# srun --ntasks-per-node=4 --gpu-bind=none on 3 hosts, the last with 3 GPUs: task 9, on the third host. Slurm 20.11, which knows
# no end of the job.
SLURM_TASK_PER_GPU = SHELL | {
    "ENVIRONMENT": "BATCH",
    "SLURM_CPUS_ON_NODE": "32",
    "SLURM_GPUS_ON_NODE": "3",
    "SLURM_GTIDS": "8,9,10",
    "SLURM_JOBID": "77",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "rack[1-2]gpu[01-02]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "rack1gpu[01-02],rack2gpu01",
    "SLURM_NPROCS": "11",
    "SLURM_NTASKS": "11",
    "SLURM_PROCID": "9",
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "rack1gpu[01-02],rack2gpu01",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURMD_NODENAME": "rack2gpu01",
    "CUDA_VISIBLE_DEVICES": "0,1,2",
}

# A batch script itself, one host; Slurm 25.05, requeued twice.
SLURM_BATCH_SCRIPT = SHELL | {
    "ENVIRONMENT": "BATCH",
    "SLURM_CPUS_ON_NODE": "64",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_GPUS_PER_NODE": "a100:4",
    "SLURM_JOBID": "3141",
    "SLURM_JOB_END_TIME": "1900086400",
    "SLURM_JOB_GPUS": "0,1,2,3",
    "SLURM_JOB_ID": "3141",
    "SLURM_JOB_NODELIST": "n07",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_START_TIME": "1900000000",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n07",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "0",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_TASKS_PER_NODE": "16",
    "SLURMD_NODENAME": "n07",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}

# salloc -N2, LaunchParameters=use_interactive_step: a shell on the first host.
SLURM_INTERACTIVE = SHELL | {
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOBID": "42",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURMD_NODENAME": "n1",
}

# salloc -N1 : -N2, as the page about heterogeneous jobs shows it: srun --het-group=0,1, the task on nid00011.
SLURM_HETEROGENEOUS = SHELL | {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "11751",
    "SLURM_JOB_ID_HET_GROUP_0": "11751",
    "SLURM_JOB_ID_HET_GROUP_1": "11752",
    "SLURM_JOB_NODELIST": "nid[00001,00011-00012]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "nid00001",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "nid[00011-00012]",
    "SLURM_JOB_NODES_HET_GROUP_0": "1",
    "SLURM_JOB_NODES_HET_GROUP_1": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "nid[00001,00011-00012]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "nid[00001,00011-00012]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURMD_NODENAME": "nid00011",
}

POD = SHELL | {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
}

# PyTorchJob of 1 master and 3 workers: worker-1. Training operator 1.5, where WORLD_SIZE counts pods.
PYTORCHJOB_15 = POD | {
    "PYTHONUNBUFFERED": "0",
    "MASTER_ADDR": "llama-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "2",
}

# The same with nprocPerNode "8". Training operator 1.9, where WORLD_SIZE counts processes and RANK still counts pods.
PYTORCHJOB_19 = POD | {
    "PYTHONUNBUFFERED": "1",
    "MASTER_ADDR": "llama-master-0",
    "PET_MASTER_ADDR": "llama-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "WORLD_SIZE": "32",
    "RANK": "2",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NNODES": "4",
}

# An elastic PyTorchJob of workers only: nothing numbers them.
PYTORCHJOB_ELASTIC = POD | {
    "PYTHONUNBUFFERED": "1",
    "PET_RDZV_ENDPOINT": "llama-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:4",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MAX_RESTARTS": "100",
    "PET_STANDALONE": "",
}

# A TrainJob of trainer 2.1: a JobSet with one Indexed Job.
TRAINJOB_2 = POD | {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "llama-node-0-0.llama",
    "PET_MASTER_PORT": "29400",
}

INDEXED_JOB = POD | {"JOB_COMPLETION_INDEX": "3", "POD_IP": "10.244.3.17"}

# Run:ai 2.16: one pod.
RUNAI_SINGLE = POD | {
    "JOB_NAME": "llama",
    "JOB_UUID": "3c1f0b2e",
    "POD_INDEX": "0",
    "POD_UUID": "a41c",
    "NODE_NAME": "dgx-3",
    "RUNAI_NUM_OF_GPUS": "4",
    "RUNAI_PROJECT": "team-a",
    "RUNAI_JOB_NAME": "llama",
}

# Run:ai 2.24: `runai training pytorch submit --workers 3 --gpu-devices-request 8`, a worker. It is a PyTorchJob.
RUNAI_DISTRIBUTED = POD | {
    "RUNAI_NUM_OF_GPUS": "8",
    "RUNAI_PROJECT": "team-a",
    "RUNAI_JOB_NAME": "llama",
    "MASTER_ADDR": "llama-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "llama-master-0",
    "PET_MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "PET_NODE_RANK": "3",
    "PET_NNODES": "4",
}

# Run:ai 2.18: `runai submit-dist pytorch --workers 1 -g 4`, the worker. RANK numbers pods, WORLD_SIZE counts GPUs of all pods.
RUNAI_218 = POD | {
    "RUNAI_NUM_OF_GPUS": "4",
    "MASTER_ADDR": "llama-master-0",
    "MASTER_PORT": "29400",
    "PET_NNODES": "2",
    "WORLD_SIZE": "8",
    "RANK": "1",
    "LOCAL_RANK": "0",
}

VAST = SHELL | {
    "CONTAINER_API_KEY": "not-a-key",
    "CONTAINER_ID": "7835610",
    "DATA_DIRECTORY": "/workspace/",
    "GPU_COUNT": "2",
    "PUBLIC_IPADDR": "65.130.162.74",
    "VAST_CONTAINERLABEL": "C.7835610",
    "VAST_TCP_PORT_22": "33526",
    "VAST_TCP_PORT_8080": "33530",
    "VAST_UDP_PORT_70001": "33531",
}

TORCHRUN = {
    "GROUP_RANK": "0",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "box",
    "MASTER_PORT": "29400",
    "RANK": "1",
    "ROLE_RANK": "1",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "2",
}

RECORDED = {
    "task per node": SLURM_TASK_PER_NODE,
    "task per gpu": SLURM_TASK_PER_GPU,
    "batch script": SLURM_BATCH_SCRIPT,
    "heterogeneous": SLURM_HETEROGENEOUS,
    "pytorchjob 1.5": PYTORCHJOB_15,
    "pytorchjob 1.9": PYTORCHJOB_19,
    "elastic pytorchjob": PYTORCHJOB_ELASTIC,
    "trainjob": TRAINJOB_2,
    "indexed job": INDEXED_JOB,
    "runai single": RUNAI_SINGLE,
    "runai distributed": RUNAI_DISTRIBUTED,
    "runai 2.18": RUNAI_218,
    "vast": VAST,
    "plain": SHELL,
}


# `ip a` of an instance that was created on an overlay, from Vast's page; and of one that joined it later.
LOOPBACK = {"lo": ("127.0.0.1", "::1")}
VAST_CREATED_ON_OVERLAY = LOOPBACK | {"eth0": ("10.0.0.1",), "eth1": ("172.17.0.2",)}
VAST_JOINED_LATER = LOOPBACK | {"eth0": ("172.17.0.2",), "eth1": ("10.0.0.7", "fe80::1")}
VAST_ALONE = LOOPBACK | {"eth0": ("172.17.0.2",)}
