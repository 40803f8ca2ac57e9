#!/usr/bin/env bash
# Submits a training workload of RunAI (command line 2.24 or newer): 1 master and 3 workers, all of which train. Copy it, set
# the lines with <-, and
#
#   bash runai.sh
#
# docs/clusters.md explains it.
set -euo pipefail

name=llama
project=team-a                                      # <-
image=registry.example.com/elastictrain:latest      # <-
workers=3                                           # <- besides the master
gpus=8                                              # <- of each pod

run=(
    recipe=llama_fsdp
    run.dir=s3://bucket/llama       # <-
    data.path=s3://bucket/tokens    # <-
    launch.min_hosts=1
    fault.notice_s=240              # for saving, after SIGTERM: shorter than the grace period
)

# For RDMA: --annotation k8s.v1.cni.cncf.io/networks=rdma-net --capability IPC_LOCK
#     --extended-resource rdma/hca_shared_devices_a=1 --master-extended-resource rdma/hca_shared_devices_a=1
# Credentials of a bucket: --env-secret AWS_ACCESS_KEY_ID=bucket,key=id --env-secret AWS_SECRET_ACCESS_KEY=bucket,key=secret
runai training pytorch submit "$name" \
    --project "$project" \
    --image "$image" \
    --workers "$workers" \
    --gpu-devices-request "$gpus" \
    --master-gpu-devices-request "$gpus" \
    --preemptibility preemptible \
    --large-shm \
    --termination-grace-period 300s \
    --restart-policy OnFailure \
    --master-restart-policy OnFailure \
    --backoff-limit 100 \
    --env-pod-field-ref POD_IP=status.podIP \
    --command -- python -m elastictrain.launch "${run[@]}"
