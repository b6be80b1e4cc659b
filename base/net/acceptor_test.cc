#include "base/net/acceptor.h"

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

void WaitUntil(const std::function<bool()>& condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition() && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_TRUE(condition());
}

// Receives connections from an acceptor and keeps them open until CloseAll.
class Kept {
 public:
  ~Kept() { CloseAll(); }
  void Take(int fd) {
    MutexLock lock(&mutex_);
    fds_.push_back(fd);
    ++taken_;
  }
  void CloseAll() {
    MutexLock lock(&mutex_);
    for (const int fd : fds_) close(fd);
    fds_.clear();
  }
  size_t taken() const {
    MutexLock lock(&mutex_);
    return taken_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<int> fds_ ABSL_GUARDED_BY(mutex_);
  size_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A client whose constructor connects and whose destructor closes
// the connection.
class Caller {
 public:
  explicit Caller(const Acceptor& acceptor) : Caller(acceptor.port(), "") {}
  Caller(int port, const std::string& path) {
    if (path.empty()) {
      sockaddr_in to = {};
      to.sin_family = AF_INET;
      to.sin_port = htons(static_cast<uint16_t>(port));
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      Connect(reinterpret_cast<sockaddr*>(&to), sizeof(to));
    } else {
      sockaddr_un to = {};
      to.sun_family = AF_UNIX;
      path.copy(to.sun_path, sizeof(to.sun_path) - 1);
      Connect(reinterpret_cast<sockaddr*>(&to), sizeof(to));
    }
  }
  Caller(Caller&& other) noexcept : fd_(other.fd_), in_(other.in_) {
    other.fd_ = -1;
  }
  ~Caller() {
    if (fd_ >= 0) close(fd_);
  }
  bool in() const { return in_; }
  bool StaysOpen() {
    char byte;
    return recv(fd_, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  // Blocks until the server has closed the connection.
  bool WaitForClose() {
    char byte;
    return recv(fd_, &byte, 1, 0) <= 0;
  }

 private:
  void Connect(const sockaddr* to, socklen_t size) {
    fd_ = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    in_ = fd_ >= 0 && connect(fd_, to, size) == 0;
  }
  int fd_ = -1;
  bool in_ = false;
};

class AcceptorTest : public ::testing::Test {
 protected:
  Acceptor::Options Keeping(size_t max_connections = 100) {
    return {.max_connections = max_connections,
            .take = [this](int fd) { kept_.Take(fd); }};
  }

  const TempFolder folder_;
  Kept kept_;
};

TEST_F(AcceptorTest, CountsTheAcceptedConnectionsThatAreOpen) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  acceptor->Run(Keeping());
  EXPECT_EQ(acceptor->target(), absl::StrCat("127.0.0.1:", acceptor->port()));
  const Caller first(*acceptor);
  const Caller second(*acceptor);
  WaitUntil([&] { return kept_.taken() == 2; });
  EXPECT_EQ(acceptor->connections(), 2u);
  kept_.CloseAll();
  EXPECT_EQ(acceptor->connections(), 0u);
}

TEST_F(
    AcceptorTest,
    HangUpDoesNotCloseAnotherSocketThatReusesTheDescriptorOfAClosedConnection) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  acceptor->Run(Keeping());
  const Caller caller(*acceptor);
  WaitUntil([&] { return kept_.taken() == 1; });
  kept_.CloseAll();
  // A new file gets the lowest free descriptor number, which is that of the
  // connection just closed.
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  EXPECT_EQ(acceptor->connections(), 0u);
  acceptor->HangUp();
  EXPECT_EQ(send(pair[0], "x", 1, MSG_NOSIGNAL), 1);
  close(pair[0]);
  close(pair[1]);
}

TEST_F(AcceptorTest, ClosesConnectionsOverTheLimitUntilOneEnds) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  acceptor->Run(Keeping(/*max_connections=*/2));
  const Caller first(*acceptor);
  const Caller second(*acceptor);
  WaitUntil([&] { return kept_.taken() == 2; });
  Caller third(*acceptor);
  EXPECT_TRUE(third.WaitForClose());
  kept_.CloseAll();
  const Caller fourth(*acceptor);
  WaitUntil([&] { return kept_.taken() == 3; });
}

TEST_F(AcceptorTest,
       ANewConnectionOverTheLimitReplacesTheOldestIfReplaceOldestIsSet) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  Acceptor::Options options = Keeping(/*max_connections=*/2);
  options.replace_oldest = true;
  acceptor->Run(options);
  Caller first(*acceptor);
  WaitUntil([&] { return kept_.taken() == 1; });
  Caller second(*acceptor);
  WaitUntil([&] { return kept_.taken() == 2; });
  Caller third(*acceptor);
  EXPECT_TRUE(first.WaitForClose());
  const Caller fourth(*acceptor);
  EXPECT_TRUE(second.WaitForClose());
  WaitUntil([&] { return kept_.taken() == 4; });
  // The server has not closed its side of the two replaced connections, so four
  // are open: twice the limit.
  Caller fifth(*acceptor);
  EXPECT_TRUE(fifth.WaitForClose());
  EXPECT_EQ(kept_.taken(), 4u);
  EXPECT_TRUE(third.StaysOpen()) << "a refused connection replaces none";
  kept_.CloseAll();
}

// gRPC's own listener never accepts a connection again after such a
// shortage (CVE-2023-4785).
TEST_F(AcceptorTest, AcceptsConnectionsAgainAfterAShortageOfFileDescriptors) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  acceptor->Run(Keeping());
  std::vector<Caller> callers;
  // Log one line now: UBSan opens a pipe when it first checks a class's type,
  // and later there are no descriptors left for it.
  LogWarning("a first line of the log", {{"of", "a test"}});
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = dup(0);
  close(next);
  const rlimit small{static_cast<rlim_t>(next) + 9, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &small), 0);
  // Each connection takes two descriptors: the client's and the accepted one.
  callers.reserve(9);
  for (int i = 0; i < 9; ++i) callers.emplace_back(*acceptor);
  EXPECT_LT(kept_.taken(), 9u);
  callers.clear();
  kept_.CloseAll();
  const size_t before_last = kept_.taken();
  const Caller last(*acceptor);
  WaitUntil([&] { return kept_.taken() > before_last; });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(AcceptorTest,
       StopListeningAcceptsTheQueuedConnectionsAndRefusesLaterOnes) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  // The system accepts these connections before the acceptor runs.
  const Caller first(*acceptor);
  const Caller second(*acceptor);
  ASSERT_TRUE(first.in() && second.in());
  acceptor->Run(Keeping());
  acceptor->StopListening();
  EXPECT_EQ(kept_.taken(), 2u);
  EXPECT_FALSE(Caller(*acceptor).in());
  EXPECT_EQ(acceptor->connections(), 2u);
  acceptor->StopListening();
}

TEST_F(AcceptorTest, HangUpClosesTheClientsConnection) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen({}));
  acceptor->Run(Keeping());
  Caller caller(*acceptor);
  WaitUntil([&] { return kept_.taken() == 1; });
  acceptor->HangUp();
  EXPECT_TRUE(caller.WaitForClose());
}

TEST_F(AcceptorTest, ListensAgainAfterItsSocketFileWasRemoved) {
  ListenAddress listen;
  listen.unix_path = folder_.File("removed");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen(listen));
  Acceptor::Options options = Keeping();
  options.probe_interval = absl::Milliseconds(5);
  acceptor->Run(std::move(options));
  // Remove the socket file, as a cleaner of /tmp may do.
  ASSERT_EQ(unlink(listen.unix_path.c_str()), 0);
  EXPECT_FALSE(Caller(0, listen.unix_path).in());
  WaitUntil([&] { return Caller(0, listen.unix_path).in(); });
  WaitUntil([&] { return kept_.taken() > 0; });
}

TEST_F(AcceptorTest, DoesNotHandItsOwnProbeConnectionsToTheServer) {
  ListenAddress on_unix;
  on_unix.unix_path = folder_.File("probed");
  for (const ListenAddress& listen :
       {ListenAddress{}, ListenAddress{.host = "0.0.0.0"}, on_unix}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen(listen));
    Acceptor::Options options = Keeping();
    options.probe_interval = absl::Milliseconds(1);
    acceptor->Run(std::move(options));
    const size_t before = kept_.taken();
    absl::SleepFor(absl::Milliseconds(100));
    EXPECT_EQ(kept_.taken(), before) << acceptor->target();
    const Caller caller(acceptor->port(), listen.unix_path);
    WaitUntil([&] { return kept_.taken() == before + 1; });
  }
}

TEST_F(AcceptorTest, AUnixSocketFileHasTheRequestedModeAndIsRemovedAtTheEnd) {
  ListenAddress listen;
  listen.unix_path = folder_.File("mode");
  listen.unix_mode = 0600;
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto acceptor, Acceptor::Listen(listen));
    struct stat file;
    ASSERT_EQ(stat(listen.unix_path.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & 0777, 0600u);
  }
  EXPECT_NE(access(listen.unix_path.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace kvasir::base
