"""Words for prompts as text: short, common and all different, so that most are one token in most vocabularies."""

from __future__ import annotations

_TEXT = """
    able about above across act add after again age ago air all almost along also always am among an and animal
    answer any appear are area arm around art as ask at away baby back bad ball bank base be bear beat bed been
    before began behind best better between big bird black blood blue board boat body bone book born both bottom box
    boy bread break bring broad broke brother brown build built burn busy but buy by call came camp can car care
    carry case cat catch caught cause cell cent center chair chance change chart check chief child city class clean
    clear climb clock close cloth cloud coast coat cold color come common cook cool copy corn corner cost could
    count country course cover cow create crop cross crowd cry cut dad dance dark day dead deal dear death deep did
    die differ direct do doctor does dog done door double down draw dream dress drink drive drop dry duck during
    each ear early earth ease east eat edge effect egg eight else end enemy energy engine enough enter equal even
    evening event ever every exact eye face fact fair fall family famous far farm fast fat father favor fear feed
    feel feet fell felt few field fig fight figure fill final find fine finger finish fire first fish fit five flat
    floor flow flower fly follow food foot for force forest form forward found four free fresh friend from front
    fruit full fun game garden gas gave general gentle get girl give glad glass go gold gone good got govern grand
    grass gray great green grew ground group grow guess guide gun had hair half hand happen happy hard has hat have
    he head hear heard heart heat heavy held help her here high hill him his history hit hold hole home hope horse
    hot hour house how huge human hundred hunt hurry
"""

WORDS = tuple(_TEXT.split())
