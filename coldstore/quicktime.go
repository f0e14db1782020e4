package coldstore

// quickMicros reads the timestamps of years with four digits, followed by zone.
func quickMicros(zone string) func(raw []byte) (int64, bool) {
	return func(raw []byte) (int64, bool) {
		// "2006-01-02T15:04:05.999999" and the zone
		const dateEnd, timeEnd = 11, 20
		last := len(raw) - 1 - len(zone)
		if last < timeEnd || raw[dateEnd] != 'T' || raw[14] != ':' || raw[17] != ':' || string(raw[last:len(raw)-1]) != zone || raw[len(raw)-1] != '"' {
			return 0, false
		}
		days, ok := plainDate(raw[:dateEnd])
		hour, minute, second := twoDigits(raw[12:]), twoDigits(raw[15:]), twoDigits(raw[18:])
		if !ok || hour > 23 || minute > 59 || second > 59 {
			return 0, false
		}
		micros := int64(0)
		if fraction := raw[timeEnd:last]; len(fraction) > 0 {
			if fraction[0] != '.' || len(fraction) < 2 || len(fraction) > 7 || fraction[len(fraction)-1] == '0' {
				return 0, false
			}
			for i := 1; i < 7; i++ {
				digit := byte('0')
				if i < len(fraction) {
					digit = fraction[i]
				}
				if digit < '0' || digit > '9' {
					return 0, false
				}
				micros = micros*10 + int64(digit-'0')
			}
		}
		return days*microsPerDay + (hour*3600+minute*60+second)*microsPerSec + micros, true
	}
}

// quickDays reads the dates of years with four digits.
func quickDays(raw []byte) (int32, bool) {
	if len(raw) != 12 || raw[11] != '"' {
		return 0, false
	}
	days, ok := plainDate(raw[:11])
	return int32(days), ok
}

// plainDate reads `"2006-01-02`, quote and all, of a day that is in every month, or of one that the calendar has.
func plainDate(b []byte) (days int64, ok bool) {
	if b[0] != '"' || b[5] != '-' || b[8] != '-' {
		return 0, false
	}
	century, rest, month, day := twoDigits(b[1:]), twoDigits(b[3:]), twoDigits(b[6:]), twoDigits(b[9:])
	year := century*100 + rest
	if century > 99 || rest > 99 || year == 0 || month < 1 || month > 12 || day < 1 || day > 31 {
		return 0, false
	}
	days = daysFromCivil(year, month, day)
	if day > 28 {
		if _, _, same := civilFromDays(days); same != day { // the 30th of February
			return 0, false
		}
	}
	return days, true
}

// twoDigits reads a number of two digits; what is none is above 99.
func twoDigits(b []byte) int64 {
	if b[0] < '0' || b[0] > '9' || b[1] < '0' || b[1] > '9' {
		return 100
	}
	return int64(b[0]-'0')*10 + int64(b[1]-'0')
}
