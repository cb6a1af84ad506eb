#!/usr/bin/env bash
# The packages as crates.io would get them: they are made without a warning, say what they must, and hold all that their
# targets need. What is unpacked is checked as a workspace of its own, where each package has the others from beside it, with
# the dependencies that ci/clippy.sh has checked already.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
unpacked=$target/unpacked
packages=(slat slat-machine slat-cli)

# The one warning that is left out: there is no public address yet to be named as `repository`. All else that cargo would
# warn of is asked for below.
log=$(cargo package --workspace --no-verify --no-metadata --allow-dirty 2>&1) || { echo "$log"; exit 1; }
echo "$log"
if grep -q '^warning' <<<"$log"; then
    echo "package: FAILED: cargo warns"
    exit 1
fi
cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
for package in json.load(sys.stdin)["packages"]:
    for key in "description", "license", "readme", "rust_version", "keywords", "categories":
        if not package[key]:
            sys.exit("package: FAILED: " + package["name"] + " has no " + key)
'

rm -rf "$unpacked"
mkdir -p "$unpacked"
version=$(cargo pkgid -p slat | sed 's/.*[#@]//')
for package in "${packages[@]}"; do
    tar -xzf "$target/package/$package-$version.crate" -C "$unpacked"
    mv "$unpacked/$package-$version" "$unpacked/$package"
    for file in LICENSE-MIT LICENSE-APACHE README.md; do
        cmp "$file" "$unpacked/$package/$file"
    done
done
cp Cargo.lock "$unpacked"
cat >"$unpacked/Cargo.toml" <<'MANIFEST'
[workspace]
resolver = "3"
members = ["slat", "slat-machine", "slat-cli"]

[patch.crates-io]
slat = { path = "slat" }
slat-machine = { path = "slat-machine" }
MANIFEST
# The profile of the workspace, or nothing would be there already.
sed -n '/^\[profile\.dev\]/,/^$/p' Cargo.toml >>"$unpacked/Cargo.toml"
cd "$unpacked"
CARGO_TARGET_DIR=$target cargo check --workspace --all-targets
