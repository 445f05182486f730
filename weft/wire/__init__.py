"""The wire: protobuf contracts (`weft.wire.v1`), streams that come back, servers that drain."""

import os

# Our processes fork to start others and nothing else. gRPC's handlers of forks run in the child of a process with
# threads before the new program does, and have crashed there (SIGSEGV): they are off before gRPC is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
