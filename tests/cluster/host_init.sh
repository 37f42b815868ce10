#!/bin/bash
# The first process of a host of the lab, in namespaces of its own. It reaps orphans, as bash does, and keeps an sshd.
#   host_init.sh NAME ETC OWN SHARED...
# ETC: files and folders that stand over those of the same name in /etc. OWN: this host's own /tmp.
# SHARED: folders below /tmp that all hosts share, as they share everything else.
set -e
name=$1 etc=$2 own=$3
shift 3
hostname "$name"
mount -t sysfs sysfs /sys # shows the interfaces of the network that it was mounted in
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/munge /run/keep
mount -t tmpfs tmpfs /run/keep
chmod 755 /run/munge
mount -t tmpfs -o size=1g tmpfs /dev/shm
for each in "$etc"/*; do
    mount --bind "$each" "/etc/${each##*/}" || true # where it is a link to something that this host does not have
done
[ ! -d "$HOME/.ssh" ] || mount -t tmpfs tmpfs "$HOME/.ssh" # what is configured for the machine is not for its hosts
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir -p "/run/keep/$number"
    mount --rbind "$folder" "/run/keep/$number"
done
chmod 1777 "$own"
mount --bind "$own" /tmp
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir -p "$folder"
    mount --rbind "/run/keep/$number" "$folder"
done
umount -R -l /run/keep
read -r _ # until the host has its network
set +e
while :; do
    /usr/sbin/sshd -D -e &
    wait $!
    sleep 1
done
