#!/usr/bin/env bash
# Checks the minimum Rust versions that the manifests state (`rust-version`).
#
# For each crate: no dependency requires a newer version. (That it uses nothing newer of std is a
# lint, `incompatible_msrv`.) The engine, which others embed, is compiled by a rustc of exactly that
# version: rustup's if it is installed, otherwise Debian's (a few seconds to fetch; apt verifies
# it); for this machine, and for Arm and RISC-V without an operating system.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/msrv

cargo metadata --format-version 1 --locked --all-features | python3 -c '
import json, sys
metadata = json.load(sys.stdin)
packages = {package["id"]: package for package in metadata["packages"]}
nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
number = lambda version: [int(part) for part in (version or "0").split(".")] + [0, 0]
failed = False
for member in metadata["workspace_members"]:
    stated, seen, todo = packages[member]["rust_version"], {member}, [member]
    while todo:
        for edge in nodes[todo.pop()]["deps"]:
            # Also those for building, and for other targets; not those for tests and benches.
            if edge["pkg"] not in seen and any(kind["kind"] != "dev" for kind in edge["dep_kinds"]):
                seen.add(edge["pkg"])
                todo.append(edge["pkg"])
    newest = max(seen, key=lambda name: number(packages[name]["rust_version"])[:3])
    name, needed = packages[member]["name"], packages[newest]["rust_version"]
    print(f"{name}: Rust {stated}; of {len(seen) - 1} dependencies none asks for more than {needed}")
    for dependency in seen:
        if number(packages[dependency]["rust_version"])[:3] > number(stated)[:3]:
            package = packages[dependency]
            print("msrv: FAILED:", name, "states", stated, "but", package["name"], "needs", package["rust_version"])
            failed = True
sys.exit(failed)
'

version=$(cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
print(next(p["rust_version"] for p in json.load(sys.stdin)["packages"] if p["name"] == "slat"))
')

# A rustc of the version in $target/debian. Debian 12 calls it rustc-web, Debian 13 rustc.
debian_rustc() {
    local name found
    for name in -web ''; do
        found=$(apt-cache madison "rustc$name" 2>/dev/null | awk -v v="$version." 'index($3, v) == 1 { print $3; exit }')
        [ -n "$found" ] || continue
        rm -rf "$target/debian" "$target/packages"
        mkdir -p "$target/debian" "$target/packages"
        (
            cd "$target/packages"
            apt-get -qq -o APT::Sandbox::User=root download \
                "rustc$name=$found" "libstd-rust$name-dev=$found" "libstd-rust$name-$version=$found" \
                "rust$name-src=$found" libllvm19
            for package in *.deb; do dpkg-deb -x "$package" "$target/debian"; done
        )
        return
    done
    return 1
}

targets=(aarch64-unknown-none riscv64gc-unknown-none-elf)
bare_metal=("${targets[@]/#/--target=}")
if rustup run "$version" rustc --version >/dev/null 2>&1; then
    rustup target add --toolchain "$version" "${targets[@]}"
    RUSTC=$(rustup run "$version" rustc --print sysroot)/bin/rustc
else
    RUSTC=$target/rustc
    # Debian has core and alloc for these targets as sources alone.
    bare_metal+=(-Zbuild-std=core,alloc)
    if ! "$RUSTC" --version 2>/dev/null | grep -qF "rustc $version." ||
        ! [ -e "$target/debian/usr/lib/rustlib/src/rust/library/Cargo.lock" ]; then
        mkdir -p "$target"
        debian_rustc || { apt-get update -qq && debian_rustc; } ||
            { echo "msrv: FAILED: no rustc $version to be had: rustup toolchain install $version"; exit 1; }
        printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' \
            "$target/debian/usr/lib/$(uname -m)-linux-gnu" "$target/debian/usr/bin/rustc" >"$RUSTC"
        chmod +x "$RUSTC"
    fi
fi
export RUSTC CARGO_TARGET_DIR=$target
"$RUSTC" --version
cargo check -p slat --lib --features vm-memory
# The flag to build core is not a stable one.
RUSTC_BOOTSTRAP=1 CARGO_PROFILE_DEV_OPT_LEVEL=0 cargo check -p slat --lib "${bare_metal[@]}"
