// The lifetime of gRPC's callback threads.
#pragma once

namespace kvasir::base {

// Keeps gRPC's callback threads until the process ends. Otherwise they end with
// the last channel or server that uses callbacks. In gRPC 1.51, a callback
// thread that itself drops the last reference frees its queue twice.
//
// Threads: any thread may call it. Only the first call has an effect.
void KeepGrpcCallbackThreads();

}  // namespace kvasir::base
