// Lifetime of the threads on which gRPC calls back.
#pragma once

namespace kvasir::base {

// Keeps gRPC's callback threads until the process ends. Without it they end
// with the last channel or server that uses callbacks, and where that last
// reference is dropped by one of those threads itself (by a client call that
// ends after all else is gone) gRPC 1.51 frees their queue twice.
//
// Threads: any. The first call counts, later ones cost nothing.
void KeepGrpcCallbackThreads();

}  // namespace kvasir::base
