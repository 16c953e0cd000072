"""What travels: protobuf messages and core types, errors and google.rpc.Status, tickets and their string form.

Everything that comes in is checked here, once; behind this package nobody sees a protobuf message of another process.
Neither grpc nor I/O is imported, so that clients of any kind can use it.
"""
