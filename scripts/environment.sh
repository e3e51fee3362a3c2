# Sourced by serve.sh and test.sh: sets PYTHON to an interpreter with SGLang and csa2, making .venv if there is none.
#
#   CSA2_PYTHON=/path/to/python   use this environment; csa2 is installed into it (editable) if it has none
#   CSA2_VENV=/path               where to make the environment (default: .venv in the repository)
#   CSA2_PIP_ARGS="..."           further arguments of pip install, for example an index of CPU-only torch wheels
#
# usage: . scripts/environment.sh [extra requirement files]

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { printf '\033[1m== %s\033[0m\n' "$*"; }

install_requirements() {
    # Each file lists every need, so pip resolves nothing; the stamp says which files were installed.
    local stamp="$1/csa2-requirements" wanted
    shift
    wanted=$(cat "$@" | sha256sum)
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    local file
    for file in "$@"; do
        say "installing $(grep -c '^[^#]*==' "$file") packages of ${file#"$repository"/} (minutes, several GB the first time)"
        # shellcheck disable=SC2086
        "$PYTHON" -m pip install --progress-bar on --no-deps --disable-pip-version-check ${CSA2_PIP_ARGS:-} -r "$file" \
            | { grep -v 'already satisfied' || true; } | sed -u 's/^\(Collecting\|Successfully installed\) /  \1 /' | cut -c1-160
        [ "${PIPESTATUS[0]}" = 0 ] || return 1
    done
    printf '%s' "$wanted" > "$stamp"
}

if [ -n "${CSA2_PYTHON:-}" ]; then
    PYTHON=$CSA2_PYTHON
    say "using $PYTHON"
else
    venv=${CSA2_VENV:-$repository/.venv}
    if [ ! -x "$venv/bin/python" ]; then
        say "making $venv"
        python3.11 -m venv "$venv"
    fi
    PYTHON=$venv/bin/python
    install_requirements "$venv" "$repository/requirements/cpu-torch.txt" "$repository/requirements/cpu.txt" "$@"
fi
"$PYTHON" -c 'import sglang' 2> /dev/null || { echo "$PYTHON has no sglang: pip install sglang==0.5.23 into it, or leave CSA2_PYTHON unset" >&2; exit 1; }
# The checkout whose package this Python imports, if any; resolved, so that no other folder passes for this one.
imported=$(cd / && "$PYTHON" -c 'import pathlib, sglang_csa2; print(pathlib.Path(sglang_csa2.__file__).resolve().parents[1])' 2> /dev/null || true)
if [ -z "$imported" ] || { [ -z "${CSA2_PYTHON:-}" ] && [ "$imported" != "$(realpath "$repository")" ]; }; then
    say "installing csa2 into it"
    "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps -e "$repository"
elif [ "$imported" != "$(realpath "$repository")" ]; then
    say "csa2 comes from $imported, as installed in that environment, and not from this checkout"
fi
