# For checks whose verdict depends on some files of the repository and nothing else: loom, proofs and models. A record
# has the hash of these files as they were when they passed. ci/nightly.sh runs such checks again all the same.

# once RECORD AGAIN FILE...: ends the script if FILEs are what the record says, unless AGAIN is `again`.
once() {
    record_file=$1
    record_hash=$(sha256sum -- "${@:3}" | LC_ALL=C sort | sha256sum | cut -d ' ' -f 1)
    if [ "$2" != again ] && [ "$(cat "$record_file" 2>/dev/null)" = "$record_hash" ]; then
        echo "$(basename "$0"): unchanged since all passed ($record_file)"
        exit 0
    fi
}

# After all has passed.
record() {
    echo "$record_hash" >"$record_file"
    echo "$(basename "$0"): all passed; $record_file says so, to be committed"
}
