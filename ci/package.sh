#!/usr/bin/env bash
# Checks the packages for crates.io: cargo makes them without a warning, and they have all required
# fields and all files of their targets. The unpacked packages are checked as a workspace, where
# each finds the others next to it, with the dependencies that ci/clippy.sh has checked already.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
unpacked=$target/unpacked
packages=(slat slat-costed slat-machine slat-model slat-results slat-userfaultfd slat-cli slat-pager)

# The one warning that is turned off: there is no public address yet for `repository`. All other
# fields that cargo would warn about are checked below.
log=$(cargo package --workspace --exclude slat-peers --exclude slat-guest-init --exclude slat-metal --exclude slat-kvm-init --no-verify --no-metadata --allow-dirty 2>&1) || { echo "$log"; exit 1; }
echo "$log"
if grep -q '^warning' <<<"$log"; then
    echo "package: FAILED: cargo warns"
    exit 1
fi
cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
for package in json.load(sys.stdin)["packages"]:
    # Not published: the benchmark of the peers, and what runs on the metal or in its guest.
    if package["publish"] == []:
        continue
    for key in "description", "license", "readme", "rust_version", "keywords", "categories":
        if not package[key]:
            sys.exit("package: FAILED: " + package["name"] + " has no " + key)
'

rm -rf "$unpacked"
mkdir -p "$unpacked"
version=$(cargo pkgid -p slat | sed 's/.*[#@]//')
for package in "${packages[@]}"; do
    # With the time of now: in the archive all files have the same old one, by which cargo would take an
    # earlier build for that of these files.
    tar -xzmf "$target/package/$package-$version.crate" -C "$unpacked"
    mv "$unpacked/$package-$version" "$unpacked/$package"
    for file in LICENSE-MIT LICENSE-APACHE README.md; do
        # The pager stands alone, and says so in a README of its own.
        [ "$package/$file" = slat-pager/README.md ] || cmp "$file" "$unpacked/$package/$file"
    done
done
cp Cargo.lock "$unpacked"
cat >"$unpacked/Cargo.toml" <<'MANIFEST'
[workspace]
resolver = "3"
members = ["slat", "slat-costed", "slat-machine", "slat-model", "slat-results", "slat-userfaultfd", "slat-cli", "slat-pager"]

[patch.crates-io]
slat = { path = "slat" }
slat-costed = { path = "slat-costed" }
slat-machine = { path = "slat-machine" }
slat-model = { path = "slat-model" }
slat-pager = { path = "slat-pager" }
slat-results = { path = "slat-results" }
slat-userfaultfd = { path = "slat-userfaultfd" }
MANIFEST
# The profiles of the workspace; without them everything would be built again.
sed -n '/^\[profile\.dev/,/^$/p' Cargo.toml >>"$unpacked/Cargo.toml"
cd "$unpacked"
CARGO_TARGET_DIR=$target cargo check --workspace --all-targets
