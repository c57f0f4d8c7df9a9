#!/usr/bin/env bash
# Makes .venv at the root of the repository and installs dstrain into it; does nothing when that is already so.
#
#   bash launch/setup.sh [EXTRA[,EXTRA…]]      extras of pyproject.toml, such as test
#
# DSTRAIN_TORCH   what to install as torch instead of pyproject.toml's range, for instance "torch==2.12.*"
#
# torch comes first and alone. Everything else is then installed under a constraint that pins the very build just
# installed, its local part (+cpu, +cu130) included: a CPU build is never replaced by a CUDA build.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.dstrain-setup" # what .venv holds; "incomplete" from the first moment to the last
extras="${1:-}"

say() { echo "setup: $*" >&2; }

fail() {
    say "$*"
    exit 2
}

# Runs a command, showing the seconds while it works if someone is watching, and how long it took.
timed() {
    local what="$1" start=$SECONDS clock=""
    shift
    if [ -t 2 ]; then
        while :; do
            printf '\rsetup: %s … %d s ' "$what" $((SECONDS - start)) >&2
            sleep 1
        done &
        clock=$!
    else
        say "$what …"
    fi
    local code=0
    "$@" || code=$?
    if [ -n "$clock" ]; then
        kill "$clock" 2>/dev/null || true
        wait "$clock" 2>/dev/null || true
        printf '\r' >&2
    fi
    [ "$code" -eq 0 ] || fail "$what: failed (see above)"
    say "$what: done in $((SECONDS - start)) s"
}

# The first Python that is new enough; one that cannot make a virtual environment is only spoken of.
find_python() {
    local candidate found="" unable=""
    for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
        found="$("$candidate" -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else exit(1)' \
            2>/dev/null)" || continue
        if "$found" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$found"
            return
        fi
        unable="$found"
    done
    [ -z "$unable" ] || fail "$unable has no venv and ensurepip; install them (Debian: apt install python3-venv)"
    fail "no Python of version 3.11 or newer found (looked for python3, python3.11 … python3.14 on PATH)"
}

# What .venv would hold if it were made now: a changed line means work. The path is part of it, since the scripts in
# a virtual environment carry it.
wanted() {
    echo "root $root"
    "$python" -c 'import sys; print("python", sys.version.split()[0])'
    "$python" -c 'import hashlib, sys; print("pyproject", hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
        "$root/pyproject.toml"
    echo "extras $extras"
    echo "torch ${DSTRAIN_TORCH:-}"
}

torch_requirement() {
    "$python" -c '
import sys, tomllib
dependencies = tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]
print(next(line for line in dependencies if line.startswith("torch")))' "$root/pyproject.toml"
}

# Errors only: notes about look-up locations that a machine's pip configuration names and that do not exist are noise.
pip_install() {
    "$python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

# A virtual environment that works and belongs here, whoever made it, is added to; another one is made anew.
usable() {
    [ -e "$stamp" ] && [ "$(cat "$stamp")" = incomplete ] && return 1
    [ -e "$stamp" ] && [ "$(head -n 1 "$stamp")" != "root $root" ] && return 1
    "$python" -c 'import sys; exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)' 2>/dev/null &&
        "$python" -m pip --version >/dev/null 2>&1
}

main() {
    # two set-ups at once would spoil each other: the second waits, and then finds everything done
    if command -v flock >/dev/null; then
        exec 9<"$root"
        flock -n 9 || { say "waiting for another set-up of this folder …"; flock 9; }
    fi

    if usable && [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ]; then
        say "$venv is current"
        return
    fi

    if ! usable; then
        local base
        base="$(find_python)"
        # Moved aside first: an interrupted removal must not leave half of it in the place of a whole one.
        rm -rf "$venv.old"
        [ ! -e "$venv" ] || mv "$venv" "$venv.old"
        rm -rf "$venv.old"
        mkdir "$venv"
        echo incomplete >"$stamp"
        timed "making .venv with $base" "$base" -m venv "$venv"
    fi
    echo incomplete >"$stamp"

    local torch constraints
    torch="${DSTRAIN_TORCH:-$(torch_requirement)}"
    timed "installing $torch" pip_install "$torch"

    constraints="$venv/constraints.txt"
    "$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$constraints"
    timed "installing dstrain${extras:+ with $extras} beside $(cat "$constraints")" \
        pip_install -c "$constraints" -e "$root${extras:+[$extras]}"

    wanted >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "$venv is ready"
}

main
