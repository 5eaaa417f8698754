#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run commands in a clone of this checkout on a machine that has nothing: a root file system made by debootstrap.
#
#     sudo -E scripts/bare_machine.sh debian FOLDER               # Debian 12, Python 3.11: make demo, make test
#     sudo -E scripts/bare_machine.sh jammy FOLDER                # Ubuntu 22.04, Python 3.10: the same
#     sudo -E scripts/bare_machine.sh trixie FOLDER               # Debian 13, Python 3.13: the same
#     sudo -E scripts/bare_machine.sh ubuntu FOLDER "make demo"   # Ubuntu 24.04, Python 3.12; commands of one's own
#     sudo -E scripts/bare_machine.sh ubuntu-vllm FOLDER          # the README's way to a server, as far as it goes without
#                                                                 # a GPU; with BIND=/usr/local/cuda by that toolkit
#     sudo -E scripts/bare_machine.sh debian-cpu FOLDER           # no compiler at all: CPU tensors, the doctor
#     sudo -E scripts/bare_machine.sh debian-arm64 FOLDER         # the same on aarch64, a DGX Spark's processor
#
# Where the processor is another, qemu runs that (apt-get install qemu-user-static), some twenty times as slowly.
# FOLDER is made, or used as it is: a second run finds the environment of the first. Commands run as user 1000, without
# any variable of the caller's but TORCH (what pip installs as torch) and pip's own (PIP_INDEX_URL, PIP_FIND_LINKS and
# so on). BIND="PATH ..." names files and folders of this machine to show inside at the same place, read-only, such as a
# folder of wheels. Ends with what each command took, and the most memory that its processes had together (seen once a
# second, shared pages once); stops at the first that fails.
set -euo pipefail
kinds="debian, trixie, ubuntu, jammy, ubuntu-vllm, debian-cpu, debian-arm64"
kind=${1:?one of $kinds} folder=$(realpath -m "${2:?a folder for the file system}")
shift 2
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
packages="python3 python3-venv ca-certificates"
pytest="OMP_NUM_THREADS=1 .venv/bin/pytest -q"
doctor="cd && checkout/.venv/bin/python -m flashinfer sm12x-doctor"
case $kind in ubuntu*) release=noble ;; jammy | trixie) release=$kind ;; *) release=bookworm ;; esac
case $kind in
  debian | trixie | ubuntu | jammy)
    packages+=" git make g++"
    [ $# -gt 0 ] || set -- "make demo" "make test"
    ;;
  ubuntu-vllm)
    packages+=" curl git g++ python3-dev"
    # Not in the checkout, which Python would take for what is installed. No GPU is here to ask.
    vllm="cd && source ~/vllm/bin/activate && export FLASHINFER_CUDA_ARCH_LIST=12.1a"
    # A toolkit that BIND shows has all that is needed; else pip brings one, and activation names it.
    cuda="export CUDA_HOME=\"\$(python -c 'from flashinfer.jit.cpp_ext import find_toolkit; print(find_toolkit().root)')\""
    cuda+=' && echo "export CUDA_HOME=$CUDA_HOME" >> ~/vllm/bin/activate'
    case " ${BIND:-} " in *" /usr/local/cuda "*) extra= cuda=: ;; *) extra=[cuda] ;; esac
    [ $# -gt 0 ] || set -- "python3 -m venv ~/vllm && source ~/vllm/bin/activate && pip install --quiet vllm==0.33.0" \
      "$vllm && pip install --quiet \"\$HOME/checkout$extra\" && $cuda" \
      "$vllm && python -m flashinfer sm12x-build --vllm bf16" \
      "$vllm && python -m flashinfer sm12x-doctor || true" \
      "$vllm && python checkout/tests/vllm_plugin/start_up.py"
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
  *) echo "$0: $kind is none of $kinds" >&2; exit 2 ;;
esac

if [ ! -d "$folder/etc" ]; then
  case $release in
    noble | jammy)
      # Debian's debootstrap knows no noble; Ubuntu's releases are all made as gutsy was. Without Ubuntu's keyring nothing
      # is verified: for trying things out.
      keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
      [ -e $keyring ] && verify=--keyring=$keyring || verify=--no-check-gpg
      debootstrap --variant=minbase --components=main,universe $verify $release "$folder" \
        http://archive.ubuntu.com/ubuntu /usr/share/debootstrap/scripts/gutsy
      ;;
    *) debootstrap --variant=minbase ${architecture:+--arch=$architecture} $release "$folder" ;;
  esac
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

# MiB of all processes in the root file system together, whenever they are more than before.
watch_memory() {
  local most=0 now
  while sleep 1; do
    now=$(find /proc -maxdepth 2 -name root -lname "$folder" -printf '%h/smaps_rollup\n' 2>/dev/null |
      xargs --no-run-if-empty awk '/^Pss:/ { sum += $2 } END { print int(sum / 1024) }' 2>/dev/null | head -n 1) || true
    [ "${now:-0}" -le $most ] || { most=$now && echo "$most" > "$1"; }
  done
}

table=$(printf '%-92s %9s %8s' command seconds MiB) status=0 memory=$(mktemp)
for command in "$@"; do
  echo "--- $command" >&2
  echo 0 > "$memory"
  watch_memory "$memory" &
  watcher=$! started=$SECONDS
  inside 1000 "$command" || status=$?
  kill $watcher
  outcome=$([ $status = 0 ] || echo ", exit status $status")
  command=${command##*&& }
  table+=$'\n'$(printf '%-92s %9d %8d%s' "${command:0:92}" $((SECONDS - started)) "$(cat "$memory")" "$outcome")
  [ $status = 0 ] || break
done
rm "$memory"
echo
. "$folder/etc/os-release"
python=$(inside 1000 'python3 --version') compilers=$(inside 1000 'command -v nvcc g++ | xargs echo')
echo "$PRETTY_NAME, $python, $(nproc) cores, compilers: ${compilers:-none}"
echo "$table"
exit $status
