#!/bin/sh
# Makes the secrets of docker-compose.yml, those that are missing: a database password, the database's address with
# it, and the key that signs the workers' tokens. Compose mounts the files as they are, and the processes inside do not
# run as the user out here: so the directory is closed to other users of this machine, and the files are readable.
set -eu
cd "$(dirname "$0")/.."
directory=.onepen/secrets
umask 077
mkdir -p "$directory"
chmod 700 "$directory"

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

write() {
    printf '%s' "$2" > "$directory/.$1.new"
    chmod 644 "$directory/.$1.new"
    mv "$directory/.$1.new" "$directory/$1"
}

[ -e "$directory/postgres_password" ] || write postgres_password "$(random)"
[ -e "$directory/token_key" ] || write token_key "$(random)"
write dsn "postgresql://onepen:$(cat "$directory/postgres_password")@postgres:5432/onepen"
printf 'secrets are in %s\n' "$directory"
