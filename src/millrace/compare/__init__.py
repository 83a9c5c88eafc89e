"""`millrace compare`: several designs on the same work, in one table and one page.

Promise: every wrong setting is found before the first run. A run that fails is a row, not the end.
A repeated command keeps the rows of finished runs, and resumes the others.
"""
