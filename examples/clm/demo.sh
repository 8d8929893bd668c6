#!/bin/sh
# What `make demo` calls; see demo.py.
exec python "$(dirname "$0")/demo.py" "$@"
