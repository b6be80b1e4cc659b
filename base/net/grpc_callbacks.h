// The lifetime of gRPC's callback threads.
#pragma once

namespace kvasir::base {

// Keeps gRPC's callback threads until the process ends. Otherwise they end with
// the last channel or server that uses callbacks. If that object is destroyed
// on one of these threads, gRPC 1.51 frees the threads' queue twice.
//
// Threads: any thread may call it. Only the first call has an effect.
void KeepGrpcCallbackThreads();

}  // namespace kvasir::base
