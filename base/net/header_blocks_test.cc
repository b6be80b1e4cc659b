#include "base/net/header_blocks.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <future>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_server.h"
#include "base/net/testing/certificates.h"
#include "base/net/tls.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::base {
namespace {

constexpr char kData = 0, kHeaders = 1, kSettings = 4, kContinuation = 9;
constexpr char kEndHeaders = 4;
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// Returns a frame. A SETTINGS frame belongs to the whole connection, other
// types to its first stream.
std::string Frame(char type, char flags, const std::string& payload) {
  const size_t size = payload.size();
  return std::string({static_cast<char>(size >> 16),
                      static_cast<char>(size >> 8), static_cast<char>(size),
                      type, flags, 0, 0, 0, type == kSettings ? '\0' : '\1'}) +
         payload;
}

// Returns CONTINUATION frames of `bytes` in total with their frame headers.
// Each byte of payload is a complete header (":method: GET"), so that gRPC
// itself accepts the frames.
std::string Continuations(size_t bytes) {
  std::string frames;
  while (bytes > 0) {
    const size_t size = std::min<size_t>(bytes, 9 + 16384);
    frames += Frame(kContinuation, 0, std::string(size - 9, '\x82'));
    bytes -= size;
  }
  return frames;
}

TEST(HeaderBlockScannerTest, RefusesAHeaderBlockThatIsLongerThanTheLimit) {
  const std::string begin = absl::StrCat(kPreface, Frame(kHeaders, 0, ""));
  HeaderBlockScanner exact;
  EXPECT_TRUE(exact.Scan(begin + Continuations(kMaxHeaderBlockBytes - 9)));
  EXPECT_FALSE(exact.Scan(Frame(kContinuation, kEndHeaders, "")));
  EXPECT_FALSE(exact.Scan(Frame(kData, 0, ""))) << "and stays so";
}

TEST(HeaderBlockScannerTest, TheHeadersOfEmptyFramesCountTowardsTheLimit) {
  HeaderBlockScanner scanner;
  EXPECT_TRUE(scanner.Scan(absl::StrCat(kPreface, Frame(kHeaders, 0, ""))));
  size_t sent = 9;
  while (scanner.Scan(Frame(kContinuation, 0, ""))) sent += 9;
  EXPECT_LE(sent, kMaxHeaderBlockBytes);
  EXPECT_GT(sent + 9, kMaxHeaderBlockBytes);
}

TEST(HeaderBlockScannerTest,
     TheLengthOfOneHeaderBlockDoesNotCountTowardsTheLimitOfTheNextBlock) {
  HeaderBlockScanner scanner;
  EXPECT_TRUE(scanner.Scan(kPreface));
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(scanner.Scan(Frame(kHeaders, 0, std::string(10000, 'x'))));
    EXPECT_TRUE(
        scanner.Scan(Frame(kContinuation, kEndHeaders, std::string(99, 'x'))));
  }
}

TEST(HeaderBlockScannerTest, DataFramesOfAnySizeAndContentAreSkipped) {
  HeaderBlockScanner scanner;
  EXPECT_TRUE(
      scanner.Scan(absl::StrCat(kPreface, Frame(kHeaders, kEndHeaders, "x"))));
  std::string payload;
  while (payload.size() < 100000) payload += Frame(kHeaders, 0, "abc");
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(scanner.Scan(Frame(kData, 0, payload)));
  }
}

TEST(HeaderBlockScannerTest, FindsFramesThatAreSplitAcrossReads) {
  const std::string bytes = absl::StrCat(
      kPreface, Frame(kSettings, 0, "123456"), Frame(kHeaders, 0, "ab"),
      Frame(kData, 0, "abc"), Continuations(kMaxHeaderBlockBytes));
  for (const size_t step : {1, 2, 3, 7, 8, 9, 10, 4096}) {
    HeaderBlockScanner scanner;
    size_t accepted = 0;
    for (size_t at = 0; at < bytes.size(); at += step) {
      if (!scanner.Scan(absl::string_view(bytes).substr(at, step))) break;
      accepted += step;
    }
    EXPECT_LT(accepted, bytes.size()) << step;
    EXPECT_GE(accepted + step + 9 + 16384, kMaxHeaderBlockBytes) << step;
  }
}

class HeaderBlocksTest : public ::testing::Test {
 protected:
  HeaderBlocksTest() {
    std::signal(SIGPIPE, SIG_IGN);
    const TestCertificate made = MakeCertificate(
        authority_, {.names = {"DNS:localhost", "IP:127.0.0.1"}});
    folder_.Write("key.pem", made.key);
    folder_.Write("certificate.pem", made.certificate);
    folder_.Write("authority.pem", authority_.certificate);
  }

  std::unique_ptr<GrpcServer> Serve(bool tls) {
    GrpcServerOptions options;
    options.max_receive_message_bytes = 64 << 20;
    if (tls) {
      TlsOptions files;
      files.files.certificate = folder_.File("certificate.pem");
      files.files.key = folder_.File("key.pem");
      options.credentials = *watch_.Server(files);
    }
    auto server = GrpcServer::Start(options, {});
    KVASIR_EXPECT_OK(server.status());
    (*server)->SetServing("", true);
    return *std::move(server);
  }

  // Sends `bytes` and then `more`, again and again. Returns how many bytes the
  // server took before it closed the connection; at most `limit` are sent.
  static size_t Flood(const GrpcServer& server, bool tls, std::string bytes,
                      const std::string& more, size_t limit) {
    SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
    const unsigned char h2[] = {2, 'h', '2'};
    SSL_CTX_set_alpn_protos(context, h2, sizeof h2);
    BIO* const connection = tls ? BIO_new_ssl_connect(context)
                                : BIO_new_connect(server.target().c_str());
    BIO_set_conn_hostname(connection, server.target().c_str());
    EXPECT_EQ(tls ? BIO_do_handshake(connection) : BIO_do_connect(connection),
              1);
    size_t sent = 0;
    while (sent < limit && BIO_write(connection, bytes.data(),
                                     static_cast<int>(bytes.size())) ==
                               static_cast<int>(bytes.size())) {
      sent += bytes.size();
      bytes = more;
    }
    ERR_clear_error();
    BIO_free_all(connection);
    SSL_CTX_free(context);
    return sent;
  }

  // Makes a health check through a gRPC channel, with a request that is
  // `padding_bytes` longer than needed.
  grpc::Status Ask(const GrpcServer& server, bool tls, size_t padding_bytes) {
    if (channel_ == nullptr) {
      TlsOptions options;
      options.files.authorities = folder_.File("authority.pem");
      channel_ = grpc::CreateChannel(server.target(),
                                     tls ? *TlsChannelCredentials(options)
                                         : grpc::InsecureChannelCredentials());
    }
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
        channel_);
    // Pad with an unknown field (number 2), which the service ignores.
    std::string request;
    if (padding_bytes > 0) {
      request = "\x12";
      for (size_t left = padding_bytes;; left >>= 7) {
        request += static_cast<char>((left & 127) | (left > 127 ? 128 : 0));
        if (left <= 127) break;
      }
      request += std::string(padding_bytes, 'x');
    }
    const grpc::Slice slice(request);
    const grpc::ByteBuffer out(&slice, 1);
    grpc::ByteBuffer in;
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &out, &in,
                   [&](const grpc::Status& status) { done.set_value(status); });
    return done.get_future().get();
  }

  const TestCertificate authority_ = MakeAuthority("authority");
  const TempFolder folder_;
  TlsWatch watch_;
  std::shared_ptr<grpc::Channel> channel_;
};

// Regression test: gRPC 1.51 kept such a block in memory (gigabytes), although
// the peer had shown no credential.
TEST_F(HeaderBlocksTest, AnEndlessHeaderBlockClosesOnlyItsOwnConnection) {
  for (const bool tls : {false, true}) {
    channel_ = nullptr;
    const auto server = Serve(tls);
    EXPECT_TRUE(Ask(*server, tls, 0).ok());
    const uint64_t before = NumHeaderBlocksRefused();
    const size_t limit = 256 << 20;
    EXPECT_LT(Flood(*server, tls,
                    absl::StrCat(kPreface, Frame(kSettings, 0, ""),
                                 Frame(kHeaders, 0, "")),
                    Continuations(16384), limit),
              limit)
        << "tls " << tls;
    EXPECT_EQ(NumHeaderBlocksRefused(), before + 1) << "tls " << tls;
    // The channel still uses the connection that it had opened before.
    EXPECT_TRUE(Ask(*server, tls, 0).ok());
    EXPECT_EQ(channel_->GetState(false), GRPC_CHANNEL_READY);
  }
}

TEST_F(HeaderBlocksTest, LargeMessagesDoNotCountAsHeaderBlocks) {
  for (const bool tls : {false, true}) {
    channel_ = nullptr;
    const auto server = Serve(tls);
    const uint64_t before = NumHeaderBlocksRefused();
    for (int i = 0; i < 4; ++i) {
      const grpc::Status status = Ask(*server, tls, 16 << 20);
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    EXPECT_EQ(NumHeaderBlocksRefused(), before);
  }
}

TEST_F(HeaderBlocksTest, AFileThatReusesAWatchedDescriptorIsNotShutDown) {
  int first[2], second[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, first), 0);
  LimitHeaderBlocks(first[0]);
  const int number = first[0];
  close(first[0]);
  close(first[1]);
  // A new file gets the lowest free descriptor number, which is that of the
  // connection just closed.
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, second), 0);
  ASSERT_EQ(second[0], number);
  const std::string flood = absl::StrCat(kPreface, Frame(kHeaders, 0, ""),
                                         Continuations(kMaxHeaderBlockBytes));
  ASSERT_EQ(send(second[1], flood.data(), flood.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(flood.size()));
  std::string read(flood.size(), '\0');
  iovec part = {read.data(), read.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  EXPECT_EQ(recvmsg(second[0], &message, MSG_WAITALL),
            static_cast<ssize_t>(flood.size()));
  EXPECT_EQ(send(second[1], "x", 1, MSG_NOSIGNAL), 1);
  close(second[0]);
  close(second[1]);
}

TEST_F(HeaderBlocksTest, RefusedHeaderBlocksAreCountedInAMetric) {
  const auto families = HeaderBlockMetrics().Collect();
  ASSERT_EQ(families.size(), 1u);
  EXPECT_EQ(families[0].name, "kvasir_header_blocks_refused_total");
  EXPECT_EQ(families[0].metric[0].counter.value,
            static_cast<double>(NumHeaderBlocksRefused()));
}

}  // namespace
}  // namespace kvasir::base
