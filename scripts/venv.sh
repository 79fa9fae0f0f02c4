# Sourced by scripts/demo and scripts/test: creates .venv and installs Copywatch and its dependencies into it.
#
#   install_into_venv EXTRAS    e.g. "" or "dev,train"; does nothing if these are installed already
#   NO_APT=1                    never install Debian packages

find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Copywatch needs Python 3.11 or newer; install it (on Debian: apt-get install python3 python3-venv)." >&2
    return 1
}

# install_debian PACKAGES...    installs the missing ones, or prints the command that does
install_debian() {
    local package missing=() become=()
    for package in "$@"; do
        if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed'; then
            missing+=("$package")
        fi
    done
    if [ ${#missing[@]} = 0 ]; then
        return
    fi
    if [ "$(id -u)" != 0 ]; then
        become=(sudo -n)
    fi
    if [ -n "${NO_APT:-}" ] || ! command -v apt-get >/dev/null || ! "${become[@]}" true 2>/dev/null; then
        echo "Missing system packages; on Debian: sudo apt-get install ${missing[*]}" >&2
        return 1
    fi
    "${become[@]}" apt-get update -qq
    "${become[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        install_debian python3-venv # Debian has this part of Python in a separate package
    fi
    "$python" -m venv --clear .venv
}

# stamp_of EXTRAS    a file that marks these extras as installed, for these requirements and this folder
stamp_of() {
    echo ".venv/.installed-$(cat pyproject.toml scripts/constraints.txt <(pwd) | sha256sum | cut -c 1-16)-${1:-plain}"
}

install_into_venv() {
    local extras=$1 stamp other
    stamp=$(stamp_of "$extras")
    # A superset of the extras is enough: the environment of the tests also runs the demo.
    for other in "${stamp%-*}-"*"$extras"*; do
        if [ -e "$other" ] && .venv/bin/python -c '' 2>/dev/null; then
            return
        fi
    done
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        make_venv
    fi
    echo "Installing into $(pwd)/.venv; the first time takes some minutes." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".${extras:+[$extras]}"
    rm -f .venv/.installed-*
    touch "$stamp"
}
