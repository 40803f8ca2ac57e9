#!/usr/bin/env bash
# What a spot machine does when it comes up: it trains as a service of systemd. Copy it, set the lines with <-, and give it to
#
#   EC2             aws ec2 create-launch-template: UserData, as base64 -w0 user-data.sh; then an Auto Scaling group
#   Compute Engine  gcloud compute instance-templates create ... --metadata-from-file=startup-script=user-data.sh
#   Azure           az vmss create ... --priority Spot --custom-data user-data.sh
#
# The machine's image needs the NVIDIA driver, Docker and the NVIDIA Container Toolkit; its role must reach the bucket.
# docs/clusters.md explains it.
set -euo pipefail

image=registry.example.com/elastictrain:latest      # <- docker/Dockerfile

run=(
    recipe=llama_fsdp
    run.dir=s3://bucket/llama       # <- gs:// and az:// as well
    data.path=s3://bucket/tokens    # <-
    launch.min_hosts=1
    fault.notice_s=25               # for saving, after SIGTERM; the cloud's own notice comes before
)

# As words of a unit: in quotes, without what systemd would expand.
words=("${run[@]//\\/\\\\}")
words=("${words[@]//\"/\\\"}")
words=("${words[@]//%/%%}")
words=("${words[@]//\$/\$\$}")
printf -v quoted '"%s" ' "${words[@]}"

# The host's /dev/shm keeps snapshots when the container ends, its network reaches the metadata service and the other hosts.
cat >/etc/systemd/system/elastictrain.service <<UNIT
[Unit]
Description=elastictrain launcher
Wants=network-online.target
Requires=docker.service
After=docker.service network-online.target
StartLimitIntervalSec=0

[Service]
ExecStartPre=-/usr/bin/docker rm --force elastictrain
ExecStartPre=/usr/bin/docker pull --quiet $image
ExecStart=/usr/bin/docker run --rm --name elastictrain --gpus all --network host --ipc host \\
    --ulimit memlock=-1 --ulimit nofile=1048576 $image python -m elastictrain.launch $quoted
# The image may take long.
TimeoutStartSec=infinity
# From SIGTERM, which the launcher gets, to SIGKILL.
KillMode=mixed
TimeoutStopSec=60
# After 64, 70 and 78 another start does the same again. Others wait until a notice, of 120 s at most, has come true.
Restart=on-failure
RestartSec=150
RestartPreventExitStatus=64 70 78

[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable elastictrain.service
systemctl start --no-block elastictrain.service
