"""What is news, and that remembering it is bounded."""

from weft_depot.core.news import News, Result

GOOD, BAD = Result("sha256:a", ""), Result("", "ConfigInvalid")


def test_a_result_is_news_when_it_is_the_first_or_another() -> None:
    news = News()
    assert [news.is_new("a", result) for result in (GOOD, GOOD, BAD, BAD, GOOD)] == [True, False, True, False, True]
    assert news.is_new("b", GOOD)


def test_the_longest_unasked_is_forgotten() -> None:
    news = News(limit=2)
    for key in ("a", "b", "a", "c"):
        news.is_new(key, GOOD)
    assert not news.is_new("a", GOOD)
    assert news.is_new("b", GOOD)
