// The expected matches are those of Hugging Face's tokenizers 0.22.2, which
// uses Oniguruma 6.9.10.
#include "model/tokenizer/regex_syntax.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

struct Row {
  const char* pattern;
  // The matches in kText, one mark for each of its characters: x begins a
  // match, - continues it. If all matches are empty, | marks each character
  // before which there is one.
  const char* marks;
};

// A text of characters that ICU and Oniguruma treat differently, or for which
// two similar constructs differ.
constexpr char32_t kText[] =
    U"aB_1 .$\r\n\v\f\x85\u2028\u00A0\u200D\u200C\u00B2\u00BD\u2460\u0300"
    U"\u203F\u00DF\u017F\u212A\u0663\u2167\U0001D518\U0001F642\uFFFE\x7F"
    U"b\n";

std::string MarksOf(const std::string& pattern) {
  std::string text;
  std::vector<size_t> char_at;  // for each byte
  size_t count = 0;
  for (const char32_t c : std::u32string_view(kText)) {
    AppendUtf8(c, &text);
    char_at.resize(text.size(), count++);
  }
  char_at.push_back(count);
  const auto regex = Regex::Compile(pattern);
  if (!regex.ok()) return std::string(regex.status().message());
  std::vector<TextRange> matches;
  KVASIR_EXPECT_OK(RegexMatcher(**regex).FindAll(text, &matches));
  std::string marks(count, '.');
  std::string pieces = "|" + std::string(count, ' ');
  bool all_empty = true;
  for (const TextRange& match : matches) {
    const size_t begin = char_at[match.begin];
    const size_t end = char_at[match.end];
    pieces[begin] = pieces[end] = '|';
    if (begin == end) continue;
    all_empty = false;
    marks.replace(begin, end - begin, "x" + std::string(end - begin - 1, '-'));
  }
  pieces.resize(count);
  return all_empty ? pieces : marks;
}

TEST(RegexSyntaxTest, EveryConstructHasTheMatchesOfTheReference) {
  const std::vector<Row> rows = {
      {R"re(.)re", "xxxxxxxx.xxxxxxxxxxxxxxxxxxxxxx."},
      {R"re(.+)re", "x-------.x---------------------."},
      {R"re((?m:.))re", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"},
      {R"re((?m:.+))re", "x-------------------------------"},
      {R"re(\N+)re", "x-------.x---------------------."},
      {R"re(\O+)re", "x-------------------------------"},
      {R"re(^)re", "|        |                      "},
      {R"re($)re", "|       |                      |"},
      {R"re(^.)re", "x........x......................"},
      {R"re(.$)re", ".......x......................x."},
      {R"re(\A.)re", "x..............................."},
      {R"re(.\Z)re", "..............................x."},
      {R"re(.\z)re", "|                               "},
      {R"re(\Z)re", "|                              |"},
      {R"re(\z)re", "|                               "},
      {R"re(\n^)re", "........x......................."},
      {R"re(\b)re", "|   |           | ||       |  ||"},
      {R"re(\B)re", "|||| ||||||||||| |  ||||||| ||  "},
      {R"re(.\b)re", "...x...........x.xx.......x..xx."},
      {R"re(\b.)re", "x...x...........x.xx.......x..x."},
      {R"re(\B.)re", ".xxx.xxx.xxxxxxx.x..xxxxxxx.xx.."},
      {R"re(\w)re", "xxxx............xx.xxxxxxxx...x."},
      {R"re(\w+)re", "x---............x-.x-------...x."},
      {R"re(\W)re", "....xxxxxxxxxxxx..x........xxx.x"},
      {R"re(\W+)re", "....x-----------..x........x--.x"},
      {R"re([\w]+)re", "x---...............x-------...x."},
      {R"re([\W]+)re", "....x--------------........x--.x"},
      {R"re([^\w])re", "....xxxxxxxxxxxxxxx........xxx.x"},
      {R"re(\d)re", "...x....................x......."},
      {R"re(\D+)re", "x--.x-------------------.x------"},
      {R"re(\s)re", "....x..xxxxxxx.................x"},
      {R"re(\s+)re", "....x..x------.................x"},
      {R"re(\S+)re", "x---.x-.......x----------------."},
      {R"re([\s]+)re", "....x..x------.................x"},
      {R"re(\h)re", "xx.x..........................x."},
      {R"re(\H+)re", "..x.x-------------------------.x"},
      {R"re(\R)re", ".......x-xxxx..................x"},
      {R"re(\R+)re", ".......x-----..................x"},
      {R"re([\v\f])re", ".........xx....................."},
      {R"re(\r|\t|\a|\e|\0)re", ".......x........................"},
      {R"re(\x{85}|\u2028|\x7F)re", "...........xx................x.."},
      {R"re([[:alnum:]])re", "xx.x.................xxxxxx...x."},
      {R"re([[:alpha:]])re", "xx...................xxx.xx...x."},
      {R"re([[:ascii:]])re", "xxxxxxxxxxx..................xxx"},
      {R"re([[:blank:]])re", "....x........x.................."},
      {R"re([[:cntrl:]])re", ".......xxxxx.................x.x"},
      {R"re([[:digit:]])re", "...x....................x......."},
      {R"re([[:graph:]])re", "xxxx.xx.......xxxxxxxxxxxxxx..x."},
      {R"re([[:lower:]])re", "x....................xx.......x."},
      {R"re([[:print:]])re", "xxxxxxx......xxxxxxxxxxxxxxx..x."},
      {R"re([[:punct:]])re", "..x..xx.............x......x...."},
      {R"re([[:space:]])re", "....x..xxxxxxx.................x"},
      {R"re([[:upper:]])re", ".x.....................x.xx....."},
      {R"re([[:xdigit:]])re", "xx.x..........................x."},
      {R"re([[:word:]])re", "xxxx...............xxxxxxxx...x."},
      {R"re([[:^alnum:]])re", "..x.xxxxxxxxxxxxxxxxx......xxx.x"},
      {R"re([[:^alpha:]])re", "..xxxxxxxxxxxxxxxxxxx...x..xxx.x"},
      {R"re([[:^ascii:]])re", "...........xxxxxxxxxxxxxxxxxx..."},
      {R"re([[:^blank:]])re", "xxxx.xxxxxxxx.xxxxxxxxxxxxxxxxxx"},
      {R"re([[:^cntrl:]])re", "xxxxxxx.....xxxxxxxxxxxxxxxxx.x."},
      {R"re([[:^digit:]])re", "xxx.xxxxxxxxxxxxxxxxxxxx.xxxxxxx"},
      {R"re([[:^graph:]])re", "....x..xxxxxxx..............xx.x"},
      {R"re([[:^lower:]])re", ".xxxxxxxxxxxxxxxxxxxx..xxxxxxx.x"},
      {R"re([[:^print:]])re", ".......xxxxxx...............xx.x"},
      {R"re([[:^punct:]])re", "xx.xx..xxxxxxxxxxxxx.xxxxxx.xxxx"},
      {R"re([[:^space:]])re", "xxxx.xx.......xxxxxxxxxxxxxxxxx."},
      {R"re([[:^upper:]])re", "x.xxxxxxxxxxxxxxxxxxxxx.x..xxxxx"},
      {R"re([[:^xdigit:]])re", "..x.xxxxxxxxxxxxxxxxxxxxxxxxxx.x"},
      {R"re([[:^word:]])re", "....xxxxxxxxxxxxxxx........xxx.x"},
      {R"re(\p{Alnum})re", "xx.x.................xxxxxx...x."},
      {R"re(\p{Blank})re", "....x........x.................."},
      {R"re(\p{Cntrl})re", ".......xxxxx.................x.x"},
      {R"re(\p{Graph})re", "xxxx.xx.......xxxxxxxxxxxxxx..x."},
      {R"re(\p{Lower})re", "x....................xx.......x."},
      {R"re(\p{Print})re", "xxxxxxx......xxxxxxxxxxxxxxx..x."},
      {R"re(\p{Punct})re", "..x..x..............x..........."},
      {R"re(\p{Space})re", "....x..xxxxxxx.................x"},
      {R"re(\p{Upper})re", ".x.....................x.xx....."},
      {R"re(\p{Xdigit})re", "xx.x..........................x."},
      {R"re(\p{Word})re", "xxxx............xx.xxxxxxxx...x."},
      {R"re(\P{Word})re", "....xxxxxxxxxxxx..x........xxx.x"},
      {R"re(\p{^Punct})re", "xx.xx.xxxxxxxxxxxxxx.xxxxxxxxxxx"},
      {R"re([\p{Word}])re", "xxxx...............xxxxxxxx...x."},
      {R"re(\p{L})re", "xx...................xxx..x...x."},
      {R"re(\p{N})re", "...x............xxx.....xx......"},
      {R"re(\p{No})re", "................xxx............."},
      {R"re(\p{P})re", "..x..x..............x..........."},
      {R"re(\p{S})re", "......x....................x...."},
      {R"re(\p{Z})re", "....x.......xx.................."},
      {R"re(\p{C})re", ".......xxxxx..xx............xx.x"},
      {R"re(\p{Cf})re", "..............xx................"},
      {R"re(\p{Latin})re", "xx...................xxx.x....x."},
      {R"re(\p{Any})re", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"},
      {R"re((?i:s))re", "......................x........."},
      {R"re((?i:k))re", ".......................x........"},
      {R"re((?i:[s-t]))re", "......................x........."},
      {R"re((?i:[^k]))re", "xxxxxxxxxxxxxxxxxxxxxxx.xxxxxxxx"},
      {R"re((?i:\w))re", "xxxx............xx.xxxxxxxx...x."},
      {R"re((?i:\p{Lu}))re", ".x.....................x..x....."},
      {R"re((?i:ab))re", "x-.............................."},
      {R"re(a(?i)B|b)re", "x-.............................."},
      {R"re((?i:(?-i:b)))re", "..............................x."},
      {R"re((?<=\w).)re", ".xxxx............xx.xxxxxxxx...."},
      {R"re((?<!\s).)re", "xxxxx.xx.......xxxxxxxxxxxxxxxx."},
      {R"re((?=\s).)re", "....x..x.xxxxx.................."},
      {R"re((?>\s+)\S)re", "....x-.x-------................."},
      {R"re(.(?!\n))re", "xxxxxxx..xxxxxxxxxxxxxxxxxxxxx.."},
      {R"re([a-c&&[^b]])re", "x..............................."},
      {R"re([^a&&b])re", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"},
      {R"re([]a])re", "x..............................."},
      {R"re([a-])re", "x..............................."},
      {R"re([\b-\r])re", ".......xxxx....................x"},
      {R"re([!--])re", "......x........................."},
      {R"re(\s{2}?)re", ".......x-x-x-..................."},
      {R"re(\s{1,2}?)re", "....x..xxxxxxx.................x"},
      {R"re(\s{2}+)re", ".......x-----..................."},
      {R"re(\s{1,2}+)re", "....x..x------.................x"},
      {R"re(\s{,2})re", "....x..x-x-x-x.................x"},
      {R"re(\s++.)re", "....x-.x-------................."},
      {R"re(\s*+)re", "....x..x------.................x"},
      {R"re(\w?+B)re", "x-.............................."},
      {R"re(s{,}|{|}|])re", "|                               "},
      {R"re(\w**)re", "x---............x-.x-------...x."},
      {R"re(\w+?)re", "xxxx............xx.xxxxxxxx...x."},
      {R"re((\s)\1)re", "|                               "},
      {R"re((?<x>\w)(?#c)+)re", "x---............x-.x-------...x."},
      {R"re(\w*)re", "x---............x-.x-------...x."},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(MarksOf(row.pattern), row.marks) << row.pattern;
  }
}

struct Refusal {
  const char* pattern;
  const char* words;  // in the error
};

TEST(RegexSyntaxTest, TheErrorForAConstructThatIsNotTranslatedNamesIt) {
  const std::vector<Refusal> refusals = {
      {R"((a)\k<1>)", R"(uses \k at byte 3)"},
      {R"((a)\g<1>)", R"(uses \g)"},
      {R"(a\K)", R"(uses \K at byte 1)"},
      {R"(\G)", R"(uses \G)"},
      {R"(\X)", R"(uses \X)"},
      {R"(\y)", R"(uses \y)"},
      {R"(\Qa\E)", R"(uses \Q)"},
      {R"(\cA)", R"(uses \c)"},
      {R"(\M-a)", R"(uses \M)"},
      {R"(\o{101})", R"(uses \o)"},
      {R"(\i)", R"(uses \i)"},
      {R"(\1(a))", R"(uses \1, but no group of this number ends before it)"},
      {R"((a\1?))", R"(uses \1, but)"},
      {R"((a)\10)", R"(uses \10, but)"},
      {R"((?=(a))\1)", R"(uses \1, but)"},
      {R"((a)\99999999999)", R"(uses \99999, but)"},
      {R"((?i:(a)\1))", R"(uses \1 without regard to case)"},
      {R"((?<n>a)(b)\1)", R"(uses \1 in a pattern with named groups)"},
      {R"((a)\1(?<n>b))", "named group in a pattern with"},
      {R"(\x85)", R"(uses \x85, a byte that is not a character)"},
      {R"(\xE2\x80\xA8)", R"(uses \xE2, a byte)"},
      {R"(\x{110000})", R"(\x{110000}, which is not the number)"},
      {R"(\x{D800})", R"(\x{D800}, which is not the number)"},
      {R"(\x{41 42})", R"(\x{41 , which is not the number)"},
      {R"(\u12)", R"(\u12, which is not the number)"},
      {R"(\x)", R"(\x, which is not the number)"},
      {R"(\pL)", R"(\p without a name in braces)"},
      {R"(\p{NoSuchThing})", "the character property NoSuchThing at byte 0"},
      {R"(\p{Script=Han})", "the character property Script=Han"},
      {"[[:foo:]]", "the POSIX class [:foo:]"},
      {"[[:alpha]", "the POSIX class [:alpha]"},
      {R"([\R])", R"(uses \R at byte 1)"},
      {R"([\X])", R"(uses \X)"},
      {R"([\1])", R"(uses \1)"},
      {R"([a-\d])", "a range that does not end in a character"},
      {"[a-[b]]", "a range that does not end in a character"},
      {R"([\d-a])", "- after a range or a class"},
      {"[a-c-e]", "- after a range or a class"},
      {"[[a]-c]", "- after a range or a class"},
      {R"([^a[^\w\W]])", "[^...] inside another class, excluding all"},
      {"(?x:a)", "uses (?x at byte 0"},
      {"(?s:.)", "uses (?s"},
      {R"((?W:\w))", "uses (?W"},
      {"(?~a)", "uses (?~"},
      {"(a)(?(1)b)", "uses (?( at byte 3"},
      {"(?{a})", "uses (?{"},
      {"(*FAIL)", "uses (*"},
      {"(?P<n>a)", "uses (?P"},
      {"(?@a)", "uses (?@"},
      {"a{3,1}", "minimum is above its maximum"},
      {"(?:a?)+?", "the quantifier +? after something that may be empty"},
      {"(?:a|)*?", "the quantifier *? after"},
      {"a*{2,}?", "the quantifier {2,}? after"},
      {"(?i:\xC3\x9F)", "a character that equals several others"},
      {"(?i:ss)", "a character that equals several others"},
      {"(?i:f(?:i))", "a character that equals several others"},
      {"(?i:[\xC3\x9F])",
       "a class with a character that equals several others"},
      {"(?i)[[:alpha:]]", "a class with a character that"},
      {"(?<=a+)b", "a look-behind whose match has no maximum length"},
      {R"((?<=\R)a)", R"(uses \R in a look-behind)"},
  };
  for (const Refusal& refusal : refusals) {
    EXPECT_THAT(Regex::Compile(refusal.pattern),
                base::StatusIs(Code::kUnimplemented, HasSubstr(refusal.words)))
        << refusal.pattern;
  }
}

TEST(RegexSyntaxTest, TheErrorForInvalidSyntaxNamesTheMistakeAndItsPlace) {
  const std::vector<Refusal> refusals = {
      {"a\\", R"(a \ that escapes nothing)"},
      {"a)", ") without ("},
      {"(a", "a group without )"},
      {"(?i", "a group without )"},
      {"(?<n", "without the end of its name"},
      {"(?#a", "a comment without an end"},
      {"[a", "[ without ]"},
      {"[]", "[ without ]"},
      {"[^]", "[ without ]"},
      {"[z-a]", "a range that ends before it begins"},
      {"*a", "a quantifier without anything to repeat"},
      {"a|+", "a quantifier without anything"},
      {"(?i)*", "a quantifier without anything"},
      {"{2}", "a quantifier without anything"},
      {"a{100001}", "more than 100000 repetitions"},
      {"(?=a)*", "a quantifier after an assertion, or after a group"},
      {R"(\b+)", "a quantifier after an assertion"},
      {"^?", "a quantifier after an assertion"},
      {"(?:a|$){2}", "a quantifier after an assertion"},
  };
  for (const Refusal& refusal : refusals) {
    EXPECT_THAT(
        Regex::Compile(refusal.pattern),
        base::StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr(refusal.words), HasSubstr(" at byte "))))
        << refusal.pattern;
  }
}

TEST(RegexSyntaxTest, ErrorsForTooManyGroupsAndClassesStateTheLimit) {
  EXPECT_THAT(TranslateRegex(std::string(300, '(') + std::string(300, ')')),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("250")));
  EXPECT_THAT(TranslateRegex(std::string(300, '[')),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("250")));
  std::string classes;
  for (int i = 0; i < 1000; ++i) classes += "\\w";
  EXPECT_THAT(TranslateRegex(classes),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("1048576")));
}

TEST(RegexSyntaxTest, AnEmptyMatchAtTheEndOfAnotherMatchDoesNotCount) {
  const auto regex = Regex::Compile("a*");
  KVASIR_ASSERT_OK(regex);
  std::vector<TextRange> matches;
  KVASIR_ASSERT_OK(RegexMatcher(**regex).FindAll("aab", &matches));
  ASSERT_EQ(matches.size(), 2u);
  EXPECT_EQ(matches[0].end, 2u);
  EXPECT_EQ(matches[1].begin, 3u);
}

}  // namespace
}  // namespace kvasir::model
