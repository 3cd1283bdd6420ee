#!/usr/bin/env bash
# Two machines on one, each with a name, an interface and an /etc/hosts of its own, and a slow link.
#
#     first   eth0 10.0.0.1  ----- 100 Mbit/s (tc tbf) -----  10.0.0.2 eth0   second
#
#   bench/netns.sh [--write]             measures between them: bench/two_machines.py
#   bench/netns.sh page                  runs what docs/two-machines.md shows, and compares
#   bench/netns.sh with COMMAND ...      runs COMMAND, in which `first CMD` and `second CMD` run CMD there
#
# RATE=1gbit sets another rate. The link has no delay but its own, some 30 us: tc netem, which would
# make one, is not in every kernel. As Debian does, each /etc/hosts leads its own machine's name to
# 127.0.1.1. Files are the same on both. Namespaces and link are gone when the command has ended.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
rate="${RATE:-100mbit}"

stop() { echo "bench/netns.sh: $1" >&2; exit 2; }

[ "$(uname)" = Linux ] || stop "needs Linux, whose network namespaces it makes"
[ "$(id -u)" = 0 ] || stop "needs root, who alone may make network namespaces: sudo bench/netns.sh"
for tool in ip tc; do
    command -v "$tool" >/dev/null || stop "needs $tool: apt-get install -y iproute2"
done
command -v unshare >/dev/null || stop "needs unshare: apt-get install -y util-linux"

tag="pace$$"
folder="$(mktemp -d)"
clean() {
    for name in first second; do
        ip netns pids "$tag-$name" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$tag-$name" 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM

ip netns add "$tag-first" 2>/dev/null || stop "may not make a network namespace here (ip netns add)"
ip netns add "$tag-second"
ip link add name eth0 netns "$tag-first" type veth peer name eth0 netns "$tag-second" ||
    stop "may not make a pair of veth interfaces here"

machine() {  # its name, its address, the other's name and address
    ip -n "$tag-$1" address add "$2/24" dev eth0
    ip -n "$tag-$1" link set lo up
    ip -n "$tag-$1" link set eth0 up
    tc -n "$tag-$1" qdisc add dev eth0 root tbf rate "$rate" burst 32kb latency 100ms ||
        stop "needs tc's tbf, which this kernel has not (modprobe sch_tbf)"
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n%s %s\n' "$1" "$4" "$3" >"$folder/hosts.$1"
    cat >"$folder/$1" <<END
#!/bin/sh
exec ip netns exec $tag-$1 unshare --uts --mount sh -c \\
    'hostname $1 && mount --bind $folder/hosts.$1 /etc/hosts && exec "\$@"' sh "\$@"
END
    chmod +x "$folder/$1"
}
machine first 10.0.0.1 second 10.0.0.2
machine second 10.0.0.2 first 10.0.0.1

export PATH="$folder:$PATH" RATE="$rate"
python="${PYTHON:-python}"
case "${1:-}" in
with)
    shift
    [ $# -gt 0 ] || stop "with what? bench/netns.sh with first hostname"
    "$@"
    ;;
page)
    mkdir "$folder/page"
    "$python" "$root/tests/support/machines_page.py" "$root/docs/two-machines.md" "$folder/page"
    ;;
*) cd "$root" && "$python" bench/two_machines.py "$@" ;;
esac
