// The lifetime of gRPC's callback threads.
#pragma once

namespace kvasir::base {

// Keeps gRPC's callback threads until the process ends. Otherwise they end with
// the last channel or server that uses callbacks. If one of these threads drops
// that last reference itself (a client call that ends after everything else is
// gone), gRPC 1.51 frees their queue twice.
//
// Threads: any. Only the first call has an effect.
void KeepGrpcCallbackThreads();

}  // namespace kvasir::base
