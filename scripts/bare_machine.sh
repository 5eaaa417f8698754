#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run commands in a clone of this checkout on a machine that has nothing: a root file system made by debootstrap.
#
#     sudo -E scripts/bare_machine.sh debian FOLDER               # Debian 12, Python 3.11: make demo, make test
#     sudo -E scripts/bare_machine.sh ubuntu FOLDER "make demo"   # Ubuntu 24.04, Python 3.12; commands of one's own
#     sudo -E scripts/bare_machine.sh debian-cpu FOLDER           # no compiler at all: CPU tensors, the doctor
#     sudo -E scripts/bare_machine.sh debian-arm64 FOLDER         # the same on aarch64, a DGX Spark's processor
#
# Where the processor is another, qemu runs that (apt-get install qemu-user-static), some twenty times as slowly.
# FOLDER is made, or used as it is: a second run finds the environment of the first. Commands run as user 1000, without
# any variable of the caller's but TORCH (what pip installs as torch) and pip's own (PIP_INDEX_URL, PIP_FIND_LINKS and
# so on). BIND="PATH ..." names files and folders of this machine to show inside at the same place, read-only, such as a
# folder of wheels. Ends with what each command took; stops at the first that fails.
set -euo pipefail
kind=${1:?debian, ubuntu, debian-cpu or debian-arm64} folder=$(realpath -m "${2:?a folder for the file system}")
shift 2
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
packages="python3 python3-venv ca-certificates"
pytest="OMP_NUM_THREADS=1 .venv/bin/pytest -q"
doctor="cd && checkout/.venv/bin/python -m flashinfer sm12x-doctor"
case $kind in
  debian | ubuntu)
    packages+=" git make g++"
    [ $# -gt 0 ] || set -- "make demo" "make test"
    ;;
  debian-cpu)
    [ $# -gt 0 ] || set -- "python3 -m venv .venv && .venv/bin/pip install --quiet ${TORCH:-torch} . pytest hypothesis" \
      "$pytest tests/moe tests/gemm tests/quantization" \
      "$doctor || true"  # it fails: there is no compiler
    ;;
  debian-arm64)
    architecture=arm64
    # The last torch whose wheel for aarch64 depends on no CUDA. Compiling all modules takes longer than running some.
    pip="pip install --quiet --no-compile ${TORCH:-torch==2.10.0}"
    [ $# -gt 0 ] || set -- "python3 -m venv .venv && .venv/bin/$pip . pytest hypothesis" \
      ".venv/bin/python -c 'import flashinfer; print(flashinfer.__file__, flashinfer.__fork_version__)'" \
      "$doctor --timeout 600 || true" ".venv/bin/python -m flashinfer sm12x-cache list" "$pytest tests/quantization" \
      "$pytest tests/moe/test_moe_planner.py tests/moe/test_moe_validation.py"
    ;;
  *) echo "$0: $kind is none of debian, ubuntu, debian-cpu, debian-arm64" >&2; exit 2 ;;
esac

if [ ! -d "$folder/etc" ]; then
  if [ "$kind" = ubuntu ]; then
    # Debian's debootstrap knows no noble; Ubuntu's releases are all made as gutsy was. Without Ubuntu's keyring nothing
    # is verified: for trying things out.
    keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
    [ -e $keyring ] && verify=--keyring=$keyring || verify=--no-check-gpg
    debootstrap --variant=minbase --components=main,universe $verify noble "$folder" http://archive.ubuntu.com/ubuntu \
      /usr/share/debootstrap/scripts/gutsy
  else
    debootstrap --variant=minbase ${architecture:+--arch=$architecture} bookworm "$folder"
  fi
fi
cp /etc/resolv.conf "$folder/etc/resolv.conf"

# Inside a mount namespace: what is mounted is gone with the command.
inside() {  # user, command
  local variables=(HOME=/home/somebody LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  mapfile -t -O ${#variables[@]} variables < <(env | grep -E '^(PIP_|TORCH=)' || true)
  BIND="${BIND:-}" unshare --mount --fork bash -c '
    set -e
    root=$1 user=$2 command=$3
    shift 3
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    if [ "$user" != 0 ]; then  # packages write to some of these places
      command="cd ~/checkout && $command"
      for place in $BIND; do
        [ ! -d "$place" ] || mkdir -p "$root$place"
        [ -e "$root$place" ] || install -D /dev/null "$root$place"
        mount --bind -o ro "$place" "$root$place"
      done
    fi
    cd /
    exec chroot --userspec="$user:$user" "$root" env -i "$@" bash -c "$command"
  ' bare "$folder" "$1" "$2" "${variables[@]}"
}

mkdir -p "$folder/dev/pts" "$folder/dev/shm" "$folder/home/somebody"
install="DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends"
inside 0 "apt-get update -qq && $install $packages >/dev/null"
inside 0 "getent passwd 1000 >/dev/null || useradd --uid 1000 --no-create-home somebody"
mkdir -p "$folder/home/somebody/checkout"
(
  cd "$folder/home/somebody/checkout"
  # Not by owner and ctime, which chown changes: what a checkout writes again, make builds again.
  here() { git -c safe.directory="$PWD" -c advice.detachedHead=false -c core.trustctime=false -c core.checkStat=minimal "$@"; }
  here init --quiet
  here fetch --quiet --depth 1 "file://$checkout" HEAD
  here checkout --quiet --force FETCH_HEAD
  here clean --quiet -ffd
)
chown -R 1000:1000 "$folder/home/somebody"

table=$(printf '%-62s %10s' command seconds) status=0
for command in "$@"; do
  echo "--- $command" >&2
  started=$SECONDS
  inside 1000 "$command" || status=$?
  outcome=$([ $status = 0 ] || echo ", exit status $status")
  table+=$'\n'$(printf '%-62s %8d s%s' "${command:0:60}" $((SECONDS - started)) "$outcome")
  [ $status = 0 ] || break
done
echo
. "$folder/etc/os-release"
python=$(inside 1000 'python3 --version') compilers=$(inside 1000 'command -v nvcc g++ | xargs echo')
echo "$PRETTY_NAME, $python, $(nproc) cores, compilers: ${compilers:-none}"
echo "$table"
exit $status
